"""Order statistics, against values worked out by hand."""

import pytest

from fastserve_common.load import stats


def test_mean_and_std() -> None:
    assert stats.mean([1.0, 2.0, 6.0]) == 3.0
    assert stats.std([2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0]) == 2.0
    assert stats.mean([]) == stats.std([]) == 0.0


@pytest.mark.parametrize(("percent", "value"), [(0, 10.0), (25, 17.5), (50, 25.0), (90, 37.0), (100, 40.0)])
def test_percentiles_interpolate_linearly(percent: float, value: float) -> None:
    assert stats.percentile([10.0, 20.0, 30.0, 40.0], percent) == pytest.approx(value)


def test_percentiles_of_little() -> None:
    assert stats.percentile([], 99) == 0.0
    assert stats.percentile([7.0], 99) == 7.0


def test_fairness() -> None:
    assert stats.jain_fairness([3.0, 3.0, 3.0]) == pytest.approx(1.0)
    assert stats.jain_fairness([1.0, 0.0, 0.0, 0.0]) == 0.25
    assert stats.jain_fairness([1.0, 2.0]) == pytest.approx(0.9)
    assert stats.jain_fairness([]) == 1.0


def test_peak_overlap_counts_half_open_spans() -> None:
    assert stats.peak_overlap([(0, 2), (1, 3), (2, 4)]) == 2
    assert stats.peak_overlap([(0, 9), (1, 2), (1.5, 1.75)]) == 3
    assert stats.peak_overlap([]) == 0


def test_peak_per_second() -> None:
    assert stats.peak_per_second([(0.1, 2), (0.9, 3), (1.0, 4), (5.5, 1)]) == 5
    assert stats.peak_per_second([]) == 0
