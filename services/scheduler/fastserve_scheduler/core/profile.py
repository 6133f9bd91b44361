"""What is known of iteration times before they are run (algorithm of the paper, section 4.1: the job profiler)."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

WIDE_RANGE = 8
"""Over this factor of prompt length a prefill must take longer, or asynchronous launches were timed, not work."""

VERY_WIDE_RANGE = 1024
"""Over this one it must take at least twice as long: no device has so much idle width."""

_Curve = tuple[tuple[int, int], ...]


def _rising(points: Sequence[tuple[int, int]]) -> _Curve:
    """The points with measurement noise taken out: no longer input is faster than a shorter one."""
    top_ns = 0
    curve = []
    for x, ns in points:
        top_ns = max(top_ns, ns)
        curve.append((x, top_ns))
    return tuple(curve)


def _at(curve: _Curve, x: int) -> int:
    """Piecewise-linear, the end segments drawn on; a curve of one point is flat."""
    if len(curve) == 1:
        return curve[0][1]
    right = min(max(bisect_left(curve, (x, 0)), 1), len(curve) - 1)
    (x0, y0), (x1, y1) = curve[right - 1], curve[right]
    return y0 + (y1 - y0) * (x - x0) // (x1 - x0)


@dataclass(frozen=True, slots=True)
class Profile:
    """Measured times of one (model, dtype, device, stages).

    `prefill`: (prompt tokens, ns) of a whole first iteration through all stages, tokens rising.
    `decode`: (sequences, context tokens of each, ns) of one decode iteration.
    Raises ValueError when the points are empty, unsorted, not positive, or impossible (a prefill that does not
    grow with its length over a factor of eight or more).
    """

    prefill: tuple[tuple[int, int], ...]
    decode: tuple[tuple[int, int, int], ...]
    min_decode_ns: int = field(init=False, repr=False, compare=False)
    _prefill_curve: _Curve = field(init=False, repr=False, compare=False)
    _decode_curves: tuple[tuple[int, _Curve], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_points("prefill", self.prefill)
        _check_points("decode", self.decode)
        _check_growth(self.prefill)
        curves: dict[int, list[tuple[int, int]]] = {}
        for sequences, context, ns in self.decode:
            curves.setdefault(sequences, []).append((context, ns))
        by_batch = tuple((sequences, _rising(points)) for sequences, points in curves.items())
        object.__setattr__(self, "min_decode_ns", min(ns for _, _, ns in self.decode))
        object.__setattr__(self, "_prefill_curve", _rising(self.prefill))
        object.__setattr__(self, "_decode_curves", by_batch)

    def prefill_ns(self, tokens: int) -> int:
        """Predicted time of a first iteration over `tokens` tokens: t_init of the paper. Never below 1."""
        return max(1, _at(self._prefill_curve, tokens))

    def decode_ns(self, batch: int, context: int) -> int:
        """Predicted time of one decode iteration of `batch` jobs with `context` tokens each."""
        across = _rising([(sequences, _at(curve, context)) for sequences, curve in self._decode_curves])
        return max(self.min_decode_ns, _at(across, batch))


def _check_points(name: str, points: Sequence[tuple[int, ...]]) -> None:
    if not points:
        raise ValueError(f"profile.{name} is empty")
    if any(value <= 0 for point in points for value in point):
        raise ValueError(f"profile.{name} has a value that is not positive")
    keys = [point[:-1] for point in points]
    if any(left >= right for left, right in pairwise(keys)):
        raise ValueError(f"profile.{name} is not sorted, or has a point twice")


def _check_growth(prefill: Sequence[tuple[int, int]]) -> None:
    (short, short_ns), (long, long_ns) = prefill[0], prefill[-1]
    least_ns = short_ns + 1 if long >= short * WIDE_RANGE else 0
    if long >= short * VERY_WIDE_RANGE:
        least_ns = 2 * short_ns
    if long_ns < least_ns:
        raise ValueError(
            f"profile.prefill is impossible: {long} tokens take {long_ns} ns, {short} tokens {short_ns} ns;"
            " time the finished work, not its launch"
        )
