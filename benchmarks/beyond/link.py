"""The tipping point of the link: from which speed on swapping loses to computing again, and to letting newcomers wait.

OPT-13B, KV memory of an A100-40, 3 job/s or 1.6 times capacity. The ratio is the time in which the link moves the KV of
a mean running job one way over that of one decode iteration of a full batch: 0.4 at 25 GB/s.
"""

import sys
from dataclasses import replace

from matplotlib.figure import Figure as Plot

from .case import A100_40_TOKENS, Case, link_bytes_per_s
from .looks import COLOURS, curve, level
from .orders import under
from .shared import legend_below, panels
from .sheets import sheet, values
from .study import Options, Report, Rows, Study, main

SWAP_COMPUTE = (0.1, 0.4, 1.0, 2.0, 4.0, 16.0, 64.0)
ALPHAS = {"paper": "alpha 0.3 s", "alpha 10 s": "alpha 10 s"}
SHORT = Case(kv_tokens=A100_40_TOKENS, host_tokens=1 << 17, rate=3.0, jobs=250)
COLUMNS = ("mean", "p95", "jct", "ttft", "wait", "blocked", "gb_out", "gb_in", "recomputed")
BASE = "alpha 10 s, 0.4"
STILL = {"recompute": replace(SHORT, kv="recompute"), "defer": replace(SHORT, kv="defer", limits=True)}
"""What does not use the link. `defer` reserves up to the limit, so it is given true ones: the best it can be."""


def at(order: str, ratio: float) -> Case:
    return replace(under(order, SHORT), swap_compute=ratio)


MOVING = {f"{name}, {ratio:g}": at(order, ratio) for order, name in ALPHAS.items() for ratio in SWAP_COMPUTE}
CASES = {**MOVING, **STILL}


def cases(options: Options) -> list[Case]:
    return list(CASES.values())


def report(rows: Rows) -> Report:
    speeds: dict[str, object] = {f"{ratio:g}": link_bytes_per_s(ratio) / 1e9 for ratio in SWAP_COMPUTE}
    found = {"GB/s by ratio": speeds, **values(rows, CASES, COLUMNS)}
    title = "KV memory of an A100-40, 3 job/s, by swap/compute ratio"
    return Report([sheet(rows, title, CASES, COLUMNS, BASE)], found, lambda: _draw(rows))


def _draw(rows: Rows) -> Plot:
    plot, axes = panels(1, 3, width=3.3, height=2.8)
    shown = (("mean", "mean latency (s/token)"), ("wait", "longest wait (s)"), ("gb_in", "GB moved in"))
    for each, (column, title) in zip(axes, shown, strict=True):
        for order, name in ALPHAS.items():
            by_ratio = [rows.of(at(order, ratio), column) for ratio in SWAP_COMPUTE]
            curve(each, SWAP_COMPUTE, by_ratio, COLOURS[order], f"swap, {name}")
        if column != "gb_in":
            for kv, case in STILL.items():
                level(each, rows.of(case, column), COLOURS[kv], f"{kv}, alpha 10 s")
        each.set(xscale="log", xlabel="swap / compute", title=title, ylim=(0, None))
        each.set_xticks(SWAP_COMPUTE, [f"{ratio:g}" for ratio in SWAP_COMPUTE])
        each.minorticks_off()
    legend_below(plot, axes[0], 4)
    return plot


STUDY = Study("link", cases, report)

if __name__ == "__main__":
    sys.exit(main(STUDY))
