"""The generated lengths have the published means, quantiles and rank correlation."""

import random
from collections.abc import Sequence

import pytest

from fastserve_common.load import stats
from fastserve_common.load.lengths import ALPACA, QUANTILES, SHAREGPT, SHAREGPT_ARTIFACT, LengthModel, quantile

N = 20_000


def ranks(values: Sequence[int]) -> list[float]:
    """Mean ranks, as ties need."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    found = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end < len(order) and values[order[end]] == values[order[start]]:
            end += 1
        for position in range(start, end):
            found[order[position]] = (start + end - 1) / 2
        start = end
    return found


def rank_correlation(pairs: Sequence[tuple[int, int]]) -> float:
    first, second = ranks([a for a, _ in pairs]), ranks([b for _, b in pairs])
    mean = (len(pairs) - 1) / 2
    covariance = stats.mean([(a - mean) * (b - mean) for a, b in zip(first, second, strict=True)])
    return covariance / (stats.std(first) * stats.std(second))


@pytest.mark.parametrize("model", [SHAREGPT, SHAREGPT_ARTIFACT, ALPACA], ids=["sharegpt", "artifact", "alpaca"])
def test_means_and_correlation_are_the_published_ones(model: LengthModel) -> None:
    rng = random.Random(5)
    pairs = [model.draw(rng) for _ in range(N)]
    assert stats.mean([a for a, _ in pairs]) == pytest.approx(model.mean_input, rel=0.03)
    assert stats.mean([b for _, b in pairs]) == pytest.approx(model.mean_output, rel=0.03)
    assert rank_correlation(pairs) == pytest.approx(model.rank_correlation, abs=0.04)
    assert all(a >= 1 and b >= 1 for a, b in pairs)
    if model.max_total_tokens is not None:
        assert max(a + b for a, b in pairs) <= model.max_total_tokens


@pytest.mark.parametrize("model", [SHAREGPT, SHAREGPT_ARTIFACT, ALPACA], ids=["sharegpt", "artifact", "alpaca"])
def test_tables_are_whole_and_rise(model: LengthModel) -> None:
    for table in (model.inputs, model.outputs):
        assert len(table) == len(QUANTILES)
        assert list(table) == sorted(table)
        assert [quantile(table, q) for q in QUANTILES] == list(table)
        assert quantile(table, -0.5) == table[0]
        assert quantile(table, 1.5) == table[-1]


def test_the_median_is_the_tables() -> None:
    rng = random.Random(6)
    outputs = sorted(SHAREGPT.draw(rng)[1] for _ in range(N))
    assert outputs[N // 2] == pytest.approx(271, rel=0.05)


def test_a_pair_that_never_fits_is_cut() -> None:
    tight = LengthModel([50] * len(QUANTILES), [60] * len(QUANTILES), 50, 60, 0.0, max_total_tokens=80)
    assert tight.draw(random.Random(0)) == (50, 30)
