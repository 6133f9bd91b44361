"""Arrival processes, statistically: seeds are fixed, so a failure is a change and not bad luck."""

import itertools
import math
import random

import pytest

from fastserve.bench.arrivals import Ramp, constant_rate, ramped
from fastserve_common.load import stats

N = 20_000


def gaps(offsets: list[float]) -> list[float]:
    return [offsets[0], *(b - a for a, b in itertools.pairwise(offsets))]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_and_variation_of_their_gamma(burstiness: float) -> None:
    offsets = constant_rate(N, 8.0, burstiness, random.Random(1))
    assert offsets[-1] == pytest.approx(N / 8.0)
    assert offsets == sorted(offsets)
    variation = stats.std(gaps(offsets)) / stats.mean(gaps(offsets))
    assert variation == pytest.approx(1 / math.sqrt(burstiness), rel=0.03)


def test_burstiness_1_is_exponential() -> None:
    """Kolmogorov-Smirnov: the distance stays below its 0.1 % critical value, 1.95 / sqrt(n)."""
    ordered = sorted(gaps(constant_rate(N, 8.0, 1.0, random.Random(2))))
    distance = max(abs((i + 1) / N - (1 - math.exp(-8.0 * gap))) for i, gap in enumerate(ordered))
    assert distance < 1.95 / math.sqrt(N)


def test_gaps_are_independent() -> None:
    found = gaps(constant_rate(N, 1.0, 1.0, random.Random(3)))
    mean = stats.mean(found)
    centred = [gap - mean for gap in found]
    correlation = sum(a * b for a, b in itertools.pairwise(centred)) / sum(c * c for c in centred)
    assert abs(correlation) < 4 / math.sqrt(N)


def test_the_extremes() -> None:
    assert constant_rate(3, math.inf, 1.0, random.Random(0)) == [0.0, 0.0, 0.0]
    assert constant_rate(4, 2.0, math.inf, random.Random(0)) == [0.5, 1.0, 1.5, 2.0]
    assert constant_rate(0, 2.0, 1.0, random.Random(0)) == []


def test_the_seed_decides() -> None:
    first, again, other = (constant_rate(50, 2.0, 1.0, random.Random(seed)) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize(("shape", "middle_rps"), [("linear", 5.05), ("exponential", math.sqrt(10 * 0.1))])
def test_ramps_go_from_start_to_end(shape: str, middle_rps: float) -> None:
    ramp = Ramp(shape, 0.1, 10.0)  # type: ignore[arg-type]  # parametrised
    assert ramp.rate_rps(0, 101) == pytest.approx(0.1)
    assert ramp.rate_rps(50, 101) == pytest.approx(middle_rps)
    assert ramp.rate_rps(100, 101) == pytest.approx(10.0)
    fixed = gaps(ramped(101, ramp, math.inf, random.Random(0)))
    assert [fixed[0], fixed[100]] == pytest.approx([10.0, 0.1])


@pytest.mark.parametrize(("rate", "burstiness"), [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0), (math.nan, 1.0)])
def test_senseless_values_are_refused(rate: float, burstiness: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        constant_rate(1, rate, burstiness, random.Random(0))
    with pytest.raises(ValueError, match="above 0"):
        Ramp("linear", 0.0, 1.0)
