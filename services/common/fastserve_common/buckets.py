"""Token buckets that several processes share: what is taken, and what one look at them says.

A bucket holds `per_min` at most and fills at that rate, so a caller who was quiet may ask for a minute's worth at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_S_PER_MIN = 60.0


@dataclass(frozen=True, slots=True)
class Draw:
    """Take `cost` of the bucket called `name`. A cost above `per_min` is never granted."""

    name: str
    per_min: int
    cost: int

    def until_full_s(self, level: float) -> float:
        return (self.per_min - level) * _S_PER_MIN / self.per_min

    def until_enough_s(self, level: float) -> float:
        return max(0.0, self.cost - level) * _S_PER_MIN / self.per_min


@dataclass(frozen=True, slots=True)
class Drawn:
    """`levels`: what is left of each bucket, in the order of the draws. Nothing was taken when not `granted`."""

    granted: bool
    levels: tuple[float, ...]
    #: Until the same draws would be granted; 0 when they were.
    wait_s: float


def draw(draws: Sequence[Draw], levels: Mapping[str, float], elapsed_s: float) -> Drawn:
    """All or nothing. `levels`: as of `elapsed_s` ago; a bucket that is not among them is full."""
    filled = [
        min(d.per_min, levels.get(d.name, d.per_min) + max(0.0, elapsed_s) * d.per_min / _S_PER_MIN) for d in draws
    ]
    wait_s = max((d.until_enough_s(level) for d, level in zip(draws, filled, strict=True)), default=0.0)
    if wait_s > 0:
        return Drawn(False, tuple(filled), wait_s)
    return Drawn(True, tuple(level - d.cost for d, level in zip(draws, filled, strict=True)), 0.0)
