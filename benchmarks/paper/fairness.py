"""The artifact's fairness comparison: latency per token by quartile of input and of output length, and Jain's index
over them. OPT-13B, ShareGPT, 400 jobs beyond capacity, all counted."""

import sys
from dataclasses import replace

from matplotlib.figure import Figure as Plot
from matplotlib.ticker import NullFormatter

from .figure import Figure, Options, Report, Table, main
from .intervals import interval
from .points import Point, Store
from .series import complete, spread
from .style import COLOURS, LABELS, legend_below, panels

ORDERS = ("fcfs", "round-robin", "paper", "alpha-10s", "srpt")
RATE = 2.5
SIDES = ("input", "output")


def at(options: Options, seed: int) -> list[Point]:
    return [Point("opt-13b", order, "sharegpt", RATE, seed, options.jobs(400)) for order in ORDERS]


def points(options: Options, store: Store) -> list[Point]:
    return [point for seed in options.seeds for point in at(options, seed)]


def report(options: Options, store: Store) -> Report:
    seeds = complete(store, options.seeds, lambda seed: at(options, seed))
    base = at(options, 0)
    rows = []
    quartiles: dict[str, dict[str, list[list[float]]]] = {side: {} for side in SIDES}
    for point in base:
        runs = [replace(point, seed=seed) for seed in seeds]
        cells = []
        for side in SIDES:
            jain = [store.number(run, "quartile_fairness", side) for run in runs]
            by_seed = [store.numbers(run, "normalised_latency_by_quartile", side) for run in runs]
            quartiles[side][point.order] = [list(values) for values in zip(*by_seed, strict=True)]
            cells += [spread(jain, 3), " ".join(f"{interval(v)[0]:.3f}" for v in quartiles[side][point.order])]
        rows.append([LABELS[point.order], *cells])
    header = ["", "Jain, input", "quartiles, short to long", "Jain, output", "quartiles, short to long"]
    table = Table(f"Mean latency per token (s) at {RATE:g} job/s by quartile ({len(seeds)} seeds)", header, rows)
    return Report([table], {"seeds": seeds, "rate": RATE, "quartiles_s": quartiles}, lambda: _draw(quartiles))


def _draw(quartiles: dict[str, dict[str, list[list[float]]]]) -> Plot:
    plot, axes = panels(1, len(SIDES), width=4.2, height=2.9)
    axes[1].sharey(axes[0])
    for side, each in zip(SIDES, axes, strict=True):
        for index, order in enumerate(ORDERS):
            heights = [interval(values)[0] for values in quartiles[side][order]]
            places = [place + 0.16 * (index - 2) for place in range(len(heights))]
            each.bar(places, heights, 0.15, color=COLOURS[order], label=LABELS[order])
        each.set_xticks(range(4), ["shortest", "", "", "longest"])
        each.set(title=f"by {side} length, quartiles", yscale="log")
        each.yaxis.set_major_formatter("{x:g}")
        each.yaxis.set_minor_formatter(NullFormatter())
    axes[0].set_ylabel("mean latency per token (s)")
    legend_below(plot, axes[0], 5)
    return plot


FIGURE = Figure("fairness", report, (points,))

if __name__ == "__main__":
    sys.exit(main(FIGURE))
