"""Arithmetic of the tables: means with intervals, and where a curve crosses a limit."""

import math
from collections.abc import Sequence

from fastserve_common.load.stats import mean

T_975 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}
"""Student's t for a two-sided 95 % interval, by degrees of freedom."""

T_MANY = 2.2
"""From ten degrees of freedom on; a little wide there."""


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half-width of its 95 % interval; the width of one value is not a number. Raises ValueError for none."""
    if not values:
        raise ValueError("no values, no interval")
    if len(values) == 1:
        return values[0], math.nan
    centre = mean(values)
    deviation = math.sqrt(sum((value - centre) ** 2 for value in values) / (len(values) - 1))
    return centre, T_975.get(len(values) - 1, T_MANY) * deviation / math.sqrt(len(values))


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Pair by pair: both sequences have one value per seed, in the same order."""
    return [left / right for left, right in zip(above, below, strict=True)]


def crossing(xs: Sequence[float], ys: Sequence[float], limit: float, *, upward: bool = True) -> float:
    """Where the curve through the points first leaves the good side of `limit`, by linear interpolation.

    `upward`: good is at or below the limit, else at or above. Infinite when it never leaves, 0 when it starts outside.
    `xs` rise.
    """
    sign = 1 if upward else -1
    over = [sign * (y - limit) for y in ys]
    if over[0] > 0:
        return 0.0
    for index in range(1, len(over)):
        if over[index] > 0:
            share = -over[index - 1] / (over[index] - over[index - 1])
            return xs[index - 1] + share * (xs[index] - xs[index - 1])
    return math.inf
