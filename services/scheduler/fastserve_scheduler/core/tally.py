"""Histograms that the core keeps itself, so that a snapshot is all that metrics need to know."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

_NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class TallySnapshot:
    """`counts[i]`: of what was at most `bounds[i]` and above the bound before it; one more for what is above all."""

    bounds: tuple[int, ...]
    counts: tuple[int, ...]
    total: int

    @property
    def count(self) -> int:
        return sum(self.counts)


@dataclass(slots=True)
class Tally:
    """Of nanoseconds, tokens or bytes. `bounds` rise; `total` is the sum of everything observed."""

    bounds: Sequence[int]
    counts: list[int] = field(default_factory=list)
    total: int = 0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: int) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def snapshot(self) -> TallySnapshot:
        return TallySnapshot(tuple(self.bounds), tuple(self.counts), self.total)


def in_ns(*seconds: float) -> tuple[int, ...]:
    """Bounds given in seconds."""
    return tuple(round(bound * _NS_PER_S) for bound in seconds)
