"""The same comparisons where the system keeps up: long runs at 70, 85, 92 and 97 % of measured capacity.

OPT-13B on ShareGPT. Capacity is what first come, first served completes when everybody is there from the start. The
first 15 and the last 10 % of the jobs are left out, so that neither filling up nor running empty is measured. It is the
second protocol of figures 1, 8, 11, 12, 13 and 15.
"""

import math
import sys
from dataclasses import dataclass, replace

from matplotlib.figure import Figure as Plot

from .curves import draw_series
from .figure import Figure, Options, Report, Table, main
from .intervals import interval
from .points import Point, Store
from .series import Series, complete, present, ratio_of, spread
from .style import LABELS, legend_below, limit_line, panels

SYSTEM, LOAD = "opt-13b", "sharegpt"
LOADS = (0.7, 0.85, 0.92, 0.97)
ORDERS = ("fcfs", "paper", "alpha-10s")
JOBS = 1000
SLO_S = 0.3
SATURATED = Point(SYSTEM, "fcfs", LOAD, 0, 99, 2000)
"""Capacity differs by 10 % between runs of 600."""
KV_LOAD = 0.92
KV_POLICIES = ("proactive", "reactive", "blocking", "recompute", "defer")
METRICS = {
    "mean, s/token": ("mean_normalised_latency", 1.0, 4),
    "P95, s/token": ("p95_normalised_latency", 1.0, 4),
    "P99, s/token": ("p99_normalised_latency", 1.0, 4),
    "completion, mean, s": ("mean_e2el_ms", 1e-3, 1),
    "first token, mean, s": ("mean_ttft_ms", 1e-3, 2),
    "longest wait, s": ("longest_wait_ms", 1e-3, 1),
    "queueing": ("queueing_share", 1.0, 3),
    "blocked on swaps": ("swap_blocked_share", 1.0, 4),
    "peak KV, K tokens": ("peak_kv_tokens", 1e-3, 1),
}
"""Of a table: (key of a point, factor, digits)."""


def saturated(options: Options, store: Store) -> list[Point]:
    return [replace(SATURATED, jobs=options.jobs(SATURATED.jobs))]


def capacity(options: Options, store: Store) -> float:
    return store.number(saturated(options, store)[0], "capacity")


def rates(options: Options, store: Store) -> list[float]:
    return [round(load * capacity(options, store), 4) for load in options.some(LOADS)]


def base(order: str, options: Options, kv: str = "proactive") -> Point:
    return Point(SYSTEM, order, LOAD, 0, 0, options.jobs(JOBS), kv=kv, window=True)


def order_points(options: Options, store: Store, seed: int) -> list[Point]:
    return [replace(base(order, options), rate=rate, seed=seed) for rate in rates(options, store) for order in ORDERS]


def kv_points(options: Options, store: Store, seed: int) -> list[Point]:
    rate = round(KV_LOAD * capacity(options, store), 4)
    return [replace(base("alpha-10s", options, kv), rate=rate, seed=seed) for kv in KV_POLICIES]


def points(options: Options, store: Store) -> list[Point]:
    found = [point for seed in options.seeds for point in order_points(options, store, seed)]
    return found + [point for seed in options.seeds for point in kv_points(options, store, seed)]


@dataclass(frozen=True, slots=True)
class AtLoad:
    """The runs of one load that are complete: by order, one for each seed."""

    load: float
    rate: float
    seeds: list[int]
    runs: dict[str, list[Point]]


def at_load(options: Options, store: Store, load: float) -> AtLoad:
    rate = round(load * capacity(options, store), 4)

    def runs(seed: int) -> list[Point]:
        return [replace(base(order, options), rate=rate, seed=seed) for order in ORDERS]

    seeds = complete(store, options.seeds, runs)
    by_order = zip(ORDERS, zip(*(runs(seed) for seed in seeds), strict=True), strict=True)
    return AtLoad(load, rate, seeds, {order: list(points) for order, points in by_order})


def report(options: Options, store: Store) -> Report:
    found = present(lambda load: at_load(options, store, load), options.some(LOADS))
    rows = [row for each in found for row in _rows(store, each)]
    header = ["load", "", *(LABELS[order] for order in ORDERS), "0.3 s / FCFS", "10 s / FCFS"]
    title = f"{options.jobs(JOBS)} jobs a run; capacity {capacity(options, store):.3f} job/s"
    curves = {
        key: {
            order: Series(
                [each.rate for each in found],
                [[store.number(run, key) for run in each.runs[order]] for each in found],
            )
            for order in ORDERS
        }
        for key, _, _ in METRICS.values()
    }
    values: dict[str, object] = {
        "capacity": capacity(options, store),
        "rates": [each.rate for each in found],
        "seeds": [each.seeds for each in found],
        **{key: {order: list(curve.values) for order, curve in by_order.items()} for key, by_order in curves.items()},
    }
    mean, p95 = curves["mean_normalised_latency"], curves["p95_normalised_latency"]
    return Report([Table(title, header, rows), *_kv_table(options, store)], values, lambda: _draw(mean, p95))


def _rows(store: Store, each: AtLoad) -> list[list[str]]:
    rows = []
    for title, (key, factor, digits) in METRICS.items():
        numbers = {order: [store.number(run, key) * factor for run in runs] for order, runs in each.runs.items()}
        cells = [spread(numbers[order], digits) for order in ORDERS]
        against = [ratio_of(numbers[order], numbers["fcfs"], math.inf) for order in ORDERS[1:]]
        rows.append([f"{each.load:.0%} ({len(each.seeds)} seeds)", title, *cells, *against])
    return rows


def _kv_table(options: Options, store: Store) -> list[Table]:
    """None while no seed has all of its runs."""
    seeds = [seed for seed in options.seeds if all(point in store for point in kv_points(options, store, seed))]
    if not seeds:
        return []
    rate = round(KV_LOAD * capacity(options, store), 4)
    rows = []
    for kv in KV_POLICIES:
        each = [replace(base("alpha-10s", options, kv), rate=rate, seed=seed) for seed in seeds]
        mean, p95 = (
            [store.number(point, f"{metric}_normalised_latency") for point in each] for metric in ("mean", "p95")
        )
        blocked = [store.number(point, "swap_blocked_share") for point in each]
        moved = [store.number(point, "swapped_in_bytes") / 1e9 for point in each]
        again = [store.number(point, "recomputed_share") for point in each]
        cells = [spread(mean, 4), spread(p95, 4), f"{interval(blocked)[0]:.2%}", f"{interval(moved)[0]:.0f}"]
        rows.append([kv, *cells, f"{interval(again)[0]:.2f}"])
    header = ["", "mean, s/token", "P95", "blocked on swaps", "GB swapped in", "recomputed"]
    return [Table(f"KV policies at {KV_LOAD:.0%}, {LABELS['alpha-10s']}, {len(seeds)} seeds", header, rows)]


def _draw(mean: dict[str, Series], p95: dict[str, Series]) -> Plot:
    plot, axes = panels(1, 2, width=4.2, height=3.0)
    for each, found, title in ((axes[0], mean, "mean"), (axes[1], p95, "P95")):
        for order, curve in found.items():
            draw_series(each, order, curve)
        limit_line(each, SLO_S, "0.3 s")
        each.set(xlabel="job/s", title=f"long runs, {title}", ylim=(0, 1.1 * SLO_S))
    axes[0].set_ylabel("latency per token (s)")
    legend_below(plot, axes[0], 3)
    return plot


FIGURE = Figure("stable", report, (saturated, points))

if __name__ == "__main__":
    sys.exit(main(FIGURE))
