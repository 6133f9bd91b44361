"""Figure 14: policies against the ratio of input to output length, with ample KV memory and beyond capacity.

Lognormal lengths, 1,024 tokens in and out together on average. Capacity is computed from the fitted iteration times, a
batch always full; the rate is 1.3 times that. The second protocol is in stable.py.
"""

import sys
from dataclasses import replace

from matplotlib.figure import Figure as Plot

from fastserve_scheduler.sim.cost import OPT_13B_A100

from .figure import Figure, Options, Report, Table, main
from .intervals import interval
from .intervals import ratios as paired
from .loads import RATIO_TOTAL
from .points import Point, Store
from .series import Series, complete, spread
from .style import COLOURS, LABELS, MARKERS, legend_below, panels

RATIOS = (0.25, 1, 4, 16, 64, 256)
ORDERS = ("fcfs", "fixed-priority", "naive-mlfq", "naive-mlfq-abort", "paper", "alpha-10s", "srpt")
SYSTEM = "opt-13b-ample"
BATCH = 16
LOAD = 1.3
"""Of the capacity."""

JOBS = ((300, 120), (100, 200), (0, 400))
"""(mean output of at least so many tokens, jobs of a run): long answers take long to simulate."""


def output_of(ratio: float) -> float:
    return max(RATIO_TOTAL / (1 + ratio), 2.0)


def capacity_of(ratio: float) -> float:
    """Jobs per second: a job takes its share of the fixed time of as many full iterations as it has tokens of output,
    and its own prompt and context. Second moments of lognormal lengths with a variation of 1 are twice the square."""
    cost, output = OPT_13B_A100, output_of(ratio)
    prompt = RATIO_TOTAL - output
    spent_ns = output / BATCH * cost.decode_fixed_ns + output * cost.decode_job_ns
    spent_ns += cost.decode_context_ns * (output * prompt + output * output)
    spent_ns += cost.prefill_token_ns * prompt + cost.prefill_token_squared_ns * 2 * prompt * prompt
    return 1e9 / spent_ns


def point(ratio: float, order: str, options: Options) -> Point:
    jobs = next(jobs for least, jobs in JOBS if output_of(ratio) >= least)
    rate = round(LOAD * capacity_of(ratio), 4)
    return Point(SYSTEM, order, f"ratio:{ratio:g}", rate, 0, options.jobs(jobs), BATCH)


def at(options: Options, seed: int) -> list[Point]:
    return [replace(point(ratio, order, options), seed=seed) for ratio in options.some(RATIOS) for order in ORDERS]


def points(options: Options, store: Store) -> list[Point]:
    return [point for seed in options.seeds for point in at(options, seed)]


def report(options: Options, store: Store) -> Report:
    means, p95s = (_curves(options, store, f"{metric}_normalised_latency") for metric in ("mean", "p95"))
    tables = [
        _table(means, "Mean latency per output token, s"),
        _gains(means),
        _table(p95s, "P95 latency per output token, s"),
    ]
    values: dict[str, object] = {
        metric: {order: list(curve.values) for order, curve in found.items()}
        for metric, found in (("mean", means), ("p95", p95s))
    }
    return Report(tables, values, lambda: _draw(means))


def _curves(options: Options, store: Store, metric: str) -> dict[str, Series]:
    ratios = options.some(RATIOS)
    seeds = complete(store, options.seeds, lambda seed: at(options, seed))

    def numbers(ratio: float, order: str) -> list[float]:
        return [store.number(replace(point(ratio, order, options), seed=seed), metric) for seed in seeds]

    return {order: Series(ratios, [numbers(ratio, order) for ratio in ratios]) for order in ORDERS}


def _table(found: dict[str, Series], title: str) -> Table:
    ratios = found["fcfs"].rates
    rows = [[LABELS[order], *(spread(values) for values in curve.values)] for order, curve in found.items()]
    return Table(title, ["", *(f"{ratio:g}" for ratio in ratios)], rows)


def _gains(found: dict[str, Series]) -> Table:
    """Mean over mean of skip-join with 0.3 s, paired by seed."""
    rows = []
    for order in ORDERS[:4]:
        pairs = [paired(others, mine) for others, mine in zip(found[order].values, found["paper"].values, strict=True)]
        best = max(interval(values)[0] for values in pairs)
        rows.append([LABELS[order], *(spread(values, 2) for values in pairs), f"{best:.1f}"])
    header = ["", *(f"{ratio:g}" for ratio in found["fcfs"].rates), "at most"]
    return Table(f"Mean over that of {LABELS['paper']}", header, rows)


def _draw(found: dict[str, Series]) -> Plot:
    plot, axes = panels(1, 1, width=5.6, height=3.4)
    (each,) = axes
    fcfs = found["fcfs"].means()
    for order, curve in found.items():
        shares = paired(curve.means(), fcfs)
        each.plot(curve.rates, shares, color=COLOURS[order], marker=MARKERS[order], markersize=4, label=LABELS[order])
    each.set(xscale="log", yscale="log", xlabel="input / output", ylim=(0.1, 12))
    each.set_xticks(list(RATIOS), [f"{ratio:g}" for ratio in RATIOS])
    each.minorticks_off()
    each.set_yticks([0.1, 0.2, 0.5, 1, 2, 5, 10], ["0.1", "0.2", "0.5", "1", "2", "5", "10"])
    each.set_ylabel("mean latency per token / FCFS")
    legend_below(plot, each, 4)
    return plot


FIGURE = Figure("fig14", report, (points,))

if __name__ == "__main__":
    sys.exit(main(FIGURE))
