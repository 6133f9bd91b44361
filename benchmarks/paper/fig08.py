"""Figure 8: peak KV memory that the order asks for when there is enough of it, feedback queues against FCFS.

The paper's own load is synthetic, OPT-2.7B with at most 20 tokens of output, and not told further; inputs are uniform
up to 1,024 here, at 1.3 times capacity. Beside it ShareGPT on OPT-13B. Its second protocol is in stable.py.
"""

import sys
from dataclasses import replace

from matplotlib.figure import Figure as Plot

from .figure import Figure, Options, Report, Table, main
from .intervals import interval, ratios
from .points import Point, Store
from .series import complete, spread
from .style import COLOURS, LABELS, panels

ORDERS = ("fcfs", "paper", "alpha-10s")
CASES = {
    "ShareGPT, 2.5 job/s": Point("opt-13b-ample", "", "sharegpt", 2.5, 0),
    "ShareGPT, 3.5 job/s": Point("opt-13b-ample", "", "sharegpt", 3.5, 0),
    "OPT-2.7B, 20 tokens": Point("opt-2.7b-ample", "", "short-answers", 30.0, 0),
}
GIB_PER_TOKEN = {"opt-13b-ample": 819_200 / 2**30, "opt-2.7b-ample": 327_680 / 2**30}
PAPER = "paper: about 2 GB, 15 GB, 7x"


def at(options: Options, seed: int) -> list[Point]:
    return [
        replace(case, order=order, seed=seed, jobs=options.jobs(case.jobs))
        for case in CASES.values()
        for order in ORDERS
    ]


def points(options: Options, store: Store) -> list[Point]:
    return [point for seed in options.seeds for point in at(options, seed)]


def report(options: Options, store: Store) -> Report:
    seeds = complete(store, options.seeds, lambda seed: at(options, seed))
    peaks: dict[str, dict[str, list[float]]] = {}
    for name, case in CASES.items():
        whole = replace(case, jobs=options.jobs(case.jobs))
        peaks[name] = {
            order: [
                store.number(replace(whole, order=order, seed=seed), "peak_kv_tokens") * GIB_PER_TOKEN[case.system]
                for seed in seeds
            ]
            for order in ORDERS
        }
    rows = [
        [
            name,
            *(spread(by_order[order], 1) for order in ORDERS),
            *(spread(ratios(by_order[order], by_order["fcfs"]), 1) for order in ORDERS[1:]),
        ]
        for name, by_order in peaks.items()
    ]
    header = [f"{len(seeds)} seeds", *(LABELS[order] for order in ORDERS), "0.3 s / FCFS", "10 s / FCFS"]
    table = Table(f"Peak KV, GiB ({PAPER})", header, rows)
    return Report([table], {"seeds": seeds, "peak_gib": peaks}, lambda: _draw(peaks))


def _draw(peaks: dict[str, dict[str, list[float]]]) -> Plot:
    plot, axes = panels(1, 1, width=6.0, height=3.0)
    (each,) = axes
    for index, order in enumerate(ORDERS):
        heights = [interval(by_order[order])[0] for by_order in peaks.values()]
        places = [place + 0.27 * (index - 1) for place in range(len(peaks))]
        bars = each.bar(places, heights, 0.25, color=COLOURS[order], label=LABELS[order])
        each.bar_label(bars, fmt="%.1f", fontsize=7)
    each.set_xticks(range(len(peaks)), list(peaks))
    each.set(ylabel="peak KV (GiB)", title="KV that the order asks for")
    each.legend(fontsize=8, frameon=False)
    return plot


FIGURE = Figure("fig08", report, (points,))

if __name__ == "__main__":
    sys.exit(main(FIGURE))
