"""The one random number of a draw."""

import numpy as np
import pytest

from fastserve_worker.sampling.uniform import mix64, uniform

KNOWN_VALUES = [0.7215081806049702, 0.6497043364684557, 0.8452358607113265]

_NUM_DRAWS = 40_000
_NUM_BINS = 100
#: Chi-square with 99 degrees of freedom is above this once in a hundred thousand fair experiments.
_CHI_SQUARE_LIMIT = 170.0


def test_the_mixer_is_splitmix64() -> None:
    """Its published first outputs from state 0."""
    golden = 0x9E3779B97F4A7C15
    outputs = [mix64(golden * i & (1 << 64) - 1) for i in range(3)]
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_known_values_never_change() -> None:
    """A seed that a user wrote down must give the same text in every release."""
    assert [uniform(7, position) for position in (0, 1, 1000)] == KNOWN_VALUES


def _chi_square(values: list[float]) -> float:
    counts = np.histogram(values, bins=_NUM_BINS, range=(0, 1))[0]
    expected = len(values) / _NUM_BINS
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("seed", [0, 1, 7, -1, 2**63 - 1, -(2**63)])
def test_positions_of_one_seed_are_uniform_and_unrelated(seed: int) -> None:
    values = [uniform(seed, position) for position in range(_NUM_DRAWS)]
    assert min(values) >= 0
    assert max(values) < 1
    assert _chi_square(values) < _CHI_SQUARE_LIMIT
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 5 / np.sqrt(_NUM_DRAWS)


@pytest.mark.parametrize("position", [0, 1, 500])
def test_seeds_at_one_position_are_uniform_and_unrelated(position: int) -> None:
    values = [uniform(seed, position) for seed in range(_NUM_DRAWS)]
    assert _chi_square(values) < _CHI_SQUARE_LIMIT
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 5 / np.sqrt(_NUM_DRAWS)


def test_a_seed_does_not_repeat_its_neighbour_shifted() -> None:
    """Answer i of several uses seed + i: streams that run after one another would give the same text late."""
    streams = [{uniform(seed, position) for position in range(2_000)} for seed in range(20)]
    assert len(set.union(*streams)) == 20 * 2_000
