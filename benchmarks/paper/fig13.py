"""Figure 13: goodput, the rate up to which 95 % of the jobs meet a limit on both phases: first token and later ones.

The limits are 5, 10 and 20 times what the phases take in an empty system, on average over the lengths. OPT-13B,
ShareGPT, the paper's protocol; the second one is in stable.py.
"""

import sys
from dataclasses import replace

from matplotlib.figure import Figure as Plot

from .curves import draw_series
from .figure import Figure, Options, Report, Table, main
from .points import GOODPUT_FACTORS, Point, Store
from .series import Series, complete, rate_at, ratio_of, series, spread
from .style import LABELS, legend_below, limit_line, panels

RATES = (1, 1.5, 2, 2.5, 3.5, 5)
ORDERS = ("fcfs", "paper", "alpha-10s")
SHARE = 0.95
PAPER = {5: ("1.77", "2.59"), 10: ("1.83", "3.01"), 20: ("-", "3.15")}
"""FastServe-FCFS and FastServe, job/s, as far as its text gives them."""


def base(order: str, options: Options) -> Point:
    return Point("opt-13b", order, "sharegpt", 0, 0, options.jobs(400))


def at(options: Options, seed: int) -> list[Point]:
    return [replace(base(order, options), rate=rate, seed=seed) for rate in options.some(RATES) for order in ORDERS]


def points(options: Options, store: Store) -> list[Point]:
    return [point for seed in options.seeds for point in at(options, seed)]


def report(options: Options, store: Store) -> Report:
    seeds = complete(store, options.seeds, lambda seed: at(options, seed))
    rates = options.some(RATES)
    found: dict[int, dict[str, Series]] = {
        factor: {
            order: series(store, base(order, options), rates, seeds, "attainment", str(factor)) for order in ORDERS
        }
        for factor in GOODPUT_FACTORS
    }
    rows = []
    for factor, by_order in found.items():
        good = {order: curve.crossings(SHARE, upward=False) for order, curve in by_order.items()}
        cells = [rate_at(good[order]) for order in ORDERS]
        against = [ratio_of(good[order], good["fcfs"], max(RATES)) for order in ORDERS[1:]]
        rows.append([f"{factor}x", *cells, *against, *PAPER[factor]])
    header = ["limit", *(LABELS[order] for order in ORDERS), "0.3 s / FCFS", "10 s / FCFS"]
    table = Table(f"Goodput, job/s ({len(seeds)} seeds)", [*header, "paper: FastServe-FCFS", "paper: FastServe"], rows)
    values = {
        f"{factor}x": {order: list(curve.values) for order, curve in by_order.items()}
        for factor, by_order in found.items()
    }
    shares = [
        [f"{factor}x", LABELS[order], *(spread(values, 2) for values in curve.values)]
        for factor, by_order in found.items()
        for order, curve in by_order.items()
    ]
    second = Table("Share of jobs within the limits, by job/s", ["limit", "", *(f"{rate:g}" for rate in rates)], shares)
    return Report([table, second], {"rates": rates, "seeds": seeds, "attainment": values}, lambda: _draw(found))


def _draw(found: dict[int, dict[str, Series]]) -> Plot:
    plot, axes = panels(1, len(found), width=3.4, height=2.8)
    for (factor, by_order), each in zip(found.items(), axes, strict=True):
        for order, curve in by_order.items():
            draw_series(each, order, curve)
        limit_line(each, SHARE, "95 %")
        each.set(xlabel="job/s", ylim=(0, 1.05), title=f"within {factor}x of an empty system")
    axes[0].set_ylabel("share of jobs")
    legend_below(plot, axes[0], 3)
    return plot


FIGURE = Figure("fig13", report, (points,))

if __name__ == "__main__":
    sys.exit(main(FIGURE))
