"""Figure 1: the share of queueing in the latency of first come, first served, at 90 and 100 % of capacity.

Lengths that are all equal, ShareGPT's and Alpaca's. The paper does not say how many jobs a batch had: 16 and 1 here,
and 16 with batches that take nobody in before all are done. Capacity is computed for each. The second protocol is the
queueing share of the long runs in stable.py.
"""

import sys
from dataclasses import dataclass

from matplotlib.figure import Figure as Plot

from .capacity import batch_by_batch, full_batches
from .figure import Figure, Options, Report, Table, main
from .intervals import interval
from .points import Point, Store
from .series import complete, spread
from .style import legend_below, panels

LOADS = (0.9, 1.0)
PAPER = {"fixed": "about 20 %", "sharegpt": "98 % (at 90 %)", "alpaca": "92.7 % (at 100 %)"}
COLOURS = ("#0072b2", "#56b4e9")


@dataclass(frozen=True, slots=True)
class Engine:
    name: str
    order: str
    batch: int
    jobs: int


ENGINES = (
    Engine("16 a batch", "fcfs", 16, 400),
    Engine("16, batch by batch", "batch-fcfs", 16, 400),
    Engine("1 a batch", "fcfs", 1, 200),
)


def at(options: Options, seed: int) -> list[Point]:
    found = []
    for engine in ENGINES:
        for load in PAPER:
            capacity = (batch_by_batch if engine.order == "batch-fcfs" else full_batches)(load, engine.batch)
            found += [
                Point(
                    "opt-13b-ample",
                    engine.order,
                    load,
                    round(share * capacity, 4),
                    seed,
                    options.jobs(engine.jobs),
                    engine.batch,
                )
                for share in LOADS
            ]
    return found


def points(options: Options, store: Store) -> list[Point]:
    return [point for seed in options.seeds for point in at(options, seed)]


def report(options: Options, store: Store) -> Report:
    seeds = complete(store, options.seeds, lambda seed: at(options, seed))
    by_seed = [at(options, seed) for seed in seeds]
    shares = iter([[store.number(point, "queueing_share") for point in same] for same in zip(*by_seed, strict=True)])
    found = {(engine.name, load): [next(shares) for _ in LOADS] for engine in ENGINES for load in PAPER}
    rows = [
        [engine.name, *(spread(values, 2) for load in PAPER for values in found[engine.name, load])]
        for engine in ENGINES
    ]
    header = ["", *(f"{load}, {share:.0%}" for load in PAPER for share in LOADS)]
    rows.append(["paper", *(PAPER[load] if share == LOADS[0] else "" for load in PAPER for share in LOADS)])
    table = Table(f"Queueing over latency, first come, first served ({len(seeds)} seeds)", header, rows)
    values = {f"{name}/{load}": shares for (name, load), shares in found.items()}
    return Report([table], {"loads": LOADS, "seeds": seeds, "shares": values}, lambda: _draw(found))


def _draw(found: dict[tuple[str, str], list[list[float]]]) -> Plot:
    plot, axes = panels(1, len(ENGINES), width=3.2, height=2.8)
    for engine, each in zip(ENGINES, axes, strict=True):
        for index, load in enumerate(LOADS):
            heights = [100 * interval(found[engine.name, name][index])[0] for name in PAPER]
            places = [place + 0.36 * index - 0.18 for place in range(len(PAPER))]
            bars = each.bar(places, heights, 0.34, color=COLOURS[index], label=f"{load:.0%} of capacity")
            each.bar_label(bars, fmt="%.0f", fontsize=7)
        each.set_xticks(range(len(PAPER)), ["equal", "ShareGPT", "Alpaca"])
        each.set(ylim=(0, 105), title=engine.name)
    axes[0].set_ylabel("queueing, % of latency")
    legend_below(plot, axes[0], 2)
    return plot


FIGURE = Figure("fig01", report, (points,))

if __name__ == "__main__":
    sys.exit(main(FIGURE))
