"""Order statistics, exactly: standard library only, so that the client stays light and the numbers are checkable."""

import math
from collections.abc import Sequence


def mean(values: Sequence[float]) -> float:
    """0 for no values, as serving benchmarks report it."""
    return math.fsum(values) / len(values) if values else 0.0


def std(values: Sequence[float]) -> float:
    """Of the population (divides by n)."""
    if not values:
        return 0.0
    centre = mean(values)
    return math.sqrt(math.fsum((v - centre) ** 2 for v in values) / len(values))


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Linear interpolation between order statistics (numpy's default). `ordered` must be sorted; 0 for no values."""
    if not ordered:
        return 0.0
    rank = (len(ordered) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def percentile_name(percent: float) -> str:
    """`p95`, `p99.9`."""
    return f"p{percent:g}"


def summary(name: str, ordered: Sequence[float], percentiles: Sequence[float], *, scale: float) -> dict[str, object]:
    """Mean, median, deviation and percentiles of sorted values, times `scale`, as `mean_NAME`, `p95_NAME`, ..."""
    values = {"mean": mean(ordered), "median": percentile(ordered, 50), "std": std(ordered)}
    values.update({percentile_name(p): percentile(ordered, p) for p in percentiles})
    return {f"{word}_{name}": value * scale for word, value in values.items()}


def jain_fairness(values: Sequence[float]) -> float:
    """(sum x)^2 / (n sum x^2): 1 when all are equal, 1/n when one has everything; 1 for no values.

    R. Jain, D. Chiu, W. Hawe, "A Quantitative Measure of Fairness and Discrimination", DEC-TR-301, 1984.
    """
    squares = math.fsum(v * v for v in values)
    return math.fsum(values) ** 2 / (len(values) * squares) if squares else 1.0


def peak_overlap(spans: Sequence[tuple[float, float]]) -> int:
    """The most half-open spans [start, end) that hold at one instant."""
    edges = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    now = peak = 0
    for _, step in edges:  # at equal times ends come first: -1 < 1
        now += step
        peak = max(peak, now)
    return peak


def peak_per_second(counts_by_time: Sequence[tuple[float, float]]) -> float:
    """The largest sum of counts in one whole second [k, k + 1)."""
    seconds: dict[int, float] = {}
    for time_s, count in counts_by_time:
        second = math.floor(time_s)
        seconds[second] = seconds.get(second, 0.0) + count
    return max(seconds.values(), default=0.0)
