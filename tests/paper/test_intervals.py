"""The arithmetic behind the tables: intervals, paired ratios, and rates at a limit."""

import importlib
import math
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def intervals(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.paper.intervals")


@pytest.fixture
def series(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.paper.series")


def test_an_interval_is_the_mean_and_students_half_width(intervals: ModuleType) -> None:
    mean, half = intervals.interval([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert half == pytest.approx(4.30 * 1.0 / math.sqrt(3))


def test_equal_values_have_no_width_and_one_value_none_at_all(intervals: ModuleType) -> None:
    assert intervals.interval([2.5, 2.5]) == (2.5, 0.0)
    mean, half = intervals.interval([7.0])
    assert mean == 7.0
    assert math.isnan(half)
    with pytest.raises(ValueError, match="no values"):
        intervals.interval([])


def test_many_values_use_the_widest_students_t_beyond_the_table(intervals: ModuleType) -> None:
    values = [0.0, 2.0] * 10
    _, half = intervals.interval(values)
    assert half == pytest.approx(2.2 * math.sqrt(20 / 19) / math.sqrt(20))


def test_ratios_are_pair_by_pair(intervals: ModuleType) -> None:
    assert intervals.ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]
    with pytest.raises(ValueError, match="longer"):
        intervals.ratios([1.0], [1.0, 2.0])


@pytest.mark.parametrize(
    ("ys", "upward", "expected"),
    [
        ([0.1, 0.2, 0.4], True, 2.5),
        ([0.1, 0.3, 0.5], True, 2.0),
        ([0.1, 0.2, 0.25], True, math.inf),
        ([0.4, 0.2, 0.1], True, 0.0),
        ([0.2, 0.6, 0.1], True, 1.25),
        ([0.5, 0.4, 0.2], False, 2.5),
        ([0.2, 0.4, 0.5], False, 0.0),
    ],
)
def test_a_curve_leaves_the_good_side(intervals: ModuleType, ys: list[float], upward: bool, expected: float) -> None:
    assert intervals.crossing([1.0, 2.0, 3.0], ys, 0.3, upward=upward) == pytest.approx(expected)


def test_a_series_knows_its_crossings_by_seed(series: ModuleType) -> None:
    curve = series.Series([1.0, 2.0], [[0.1, 0.2], [0.5, 0.4]])
    assert curve.means() == pytest.approx([0.15, 0.45])
    assert curve.crossings(0.3) == pytest.approx([1.5, 1.5])
    assert series.Series([1.0, 2.0], [[0.1], [0.25]]).halves() == [0.0, 0.0]
    assert series.Series([1.0], [[0.25, 0.75]]).halves() == [0.25]  # the bars reach from one seed to the other


def test_what_lies_beyond_the_sweep_is_said_to(series: ModuleType) -> None:
    assert series.rate_at([1.0, math.inf]) == "beyond in 1 of 2"
    assert series.rate_at([0.0, 2.0, 0.0]) == "below in 2 of 3"
    assert series.rate_at([1.5, 1.25]) == "1.50, 1.25"
    assert series.spread([1.0, 1.0, 1.0], 1) == "1.0±0.0"
    assert series.spread([1.25]) == "1.250"
    assert series.ratio_of([4.0, math.inf], [2.0, 2.0], 5.0) == ">2.00, 2.50"
    assert series.ratio_of([4.0], [2.0], 5.0) == "2.00"
    assert series.ratio_of([4.0], [math.inf], 5.0) == "-"
    assert series.ratio_of([4.0], [0.0], 5.0) == "-"
