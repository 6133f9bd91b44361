"""Points over rates and seeds as curves with intervals, and the rates at which they reach a limit."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from .intervals import crossing, interval, ratios
from .points import Point, Store


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
        """Half-widths of the 95 % intervals; 0 where one seed has none."""
        return [0.0 if math.isnan(half := interval(values)[1]) else half for values in self.values]

    def crossings(self, limit: float, *, upward: bool = True) -> list[float]:
        """By seed."""
        return [crossing(self.rates, list(ys), limit, upward=upward) for ys in zip(*self.values, strict=True)]


def complete(store: Store, seeds: Iterable[int], points: Callable[[int], Iterable[Point]]) -> list[int]:
    """The seeds of which all points are measured. Raises MissingError when there is none."""
    found = [seed for seed in seeds if all(point in store for point in points(seed))]
    if not found:
        raise MissingError("no seed is complete: run it again to go on")
    return found


def series(store: Store, base: Point, rates: Sequence[float], seeds: Sequence[int], *path: str) -> Series:
    rows = [[store.number(replace(base, rate=rate, seed=seed), *path) for seed in seeds] for rate in rates]
    return Series(rates, rows)


def spread(values: Sequence[float], digits: int = 3) -> str:
    """`mean±half`; `>` the largest finite one where some are infinite."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < len(values):
        return f"beyond in {len(values) - len(finite)} of {len(values)}"
    centre, half = interval(values)
    return f"{centre:.{digits}f}" if math.isnan(half) else f"{centre:.{digits}f}±{half:.{digits}f}"


def ratio_of(above: Sequence[float], below: Sequence[float], largest: float) -> str:
    """Paired ratios with their interval; a rate beyond the sweep counts as its `largest` and makes it a lower bound."""
    if any(math.isinf(value) for value in below):
        return "-"
    beyond = any(math.isinf(value) for value in above)
    pairs = ratios([min(value, largest) for value in above], [min(value, largest) for value in below])
    return (">" if beyond else "") + spread(pairs, 2)
