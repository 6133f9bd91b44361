"""Points over rates and seeds as curves with intervals, and the rates at which they reach a limit."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from .intervals import crossing, interval, ratios
from .points import Point, Store

Item = TypeVar("Item")
Found = TypeVar("Found")


ENOUGH = 3
"""Values that make an interval: of two it would be ten times as wide as what is between them."""


class MissingError(Exception):
    """A sentence for the person who wants a report."""


@dataclass(frozen=True, slots=True)
class Series:
    """One number over rates: `values[rate][seed]`."""

    rates: Sequence[float]
    values: Sequence[Sequence[float]]

    def means(self) -> list[float]:
        return [interval(values)[0] for values in self.values]

    def halves(self) -> list[float]:
        """Half-widths of the 95 % intervals; of two seeds half of what is between them, of one 0."""
        return [_half(values) for values in self.values]

    def crossings(self, limit: float, *, upward: bool = True) -> list[float]:
        """By seed."""
        return [crossing(self.rates, list(ys), limit, upward=upward) for ys in zip(*self.values, strict=True)]


def complete(store: Store, seeds: Iterable[int], points: Callable[[int], Iterable[Point]]) -> list[int]:
    """The seeds of which all points are measured. Raises MissingError when there is none."""
    found = [seed for seed in seeds if all(point in store for point in points(seed))]
    if not found:
        raise MissingError("no seed is complete: run it again to go on")
    return found


def present(build: Callable[[Item], Found], items: Iterable[Item]) -> list[Found]:
    """What can be built of points that are there; MissingError when nothing can."""
    found = []
    for item in items:
        with suppress(MissingError):
            found.append(build(item))
    if not found:
        raise MissingError("no seed is complete: run it again to go on")
    return found


def series(store: Store, base: Point, rates: Sequence[float], seeds: Sequence[int], *path: str) -> Series:
    rows = [[store.number(replace(base, rate=rate, seed=seed), *path) for seed in seeds] for rate in rates]
    return Series(rates, rows)


def rate_at(crossings: Sequence[float]) -> str:
    """A rate at a limit; or how many seeds are outside already at the first rate, or still inside at the last one."""
    for outside, word in ((0.0, "below"), (math.inf, "beyond")):
        if outside in crossings:
            return f"{word} in {list(crossings).count(outside)} of {len(crossings)}"
    return spread(crossings, 2)


def _half(values: Sequence[float]) -> float:
    return interval(values)[1] if len(values) >= ENOUGH else (max(values) - min(values)) / 2


def spread(values: Sequence[float], digits: int = 3) -> str:
    """`mean±half` of three values and more; one or two as they are."""
    if len(values) < ENOUGH:
        return ", ".join(f"{value:.{digits}f}" for value in values)
    centre, half = interval(values)
    return f"{centre:.{digits}f}±{half:.{digits}f}"


def ratio_of(above: Sequence[float], below: Sequence[float], largest: float) -> str:
    """Paired ratios with their interval; a rate beyond the sweep counts as its `largest` and makes it a lower bound."""
    if not all(0 < value < math.inf for value in below):
        return "-"
    beyond = any(math.isinf(value) for value in above)
    pairs = ratios([min(value, largest) for value in above], [min(value, largest) for value in below])
    return (">" if beyond else "") + spread(pairs, 2)
