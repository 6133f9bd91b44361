"""KV heads: multi-head, grouped-query and multi-query attention under the same load.

The shape of Llama-3-8B with 32, 8 (its own) and 1 KV heads on an A100-40, KV memory as the weights leave it. 64 jobs
a batch, prompts whole, ShareGPT-like lengths. Iteration times by the roofline.
"""

import sys
from dataclasses import replace

from matplotlib.figure import Figure as Plot

from .case import Case
from .looks import COLOURS
from .orders import under
from .shared import legend_below, panels
from .sheets import sheet, values
from .study import Options, Report, Rows, Study, centre, main

HEADS = {"MHA": 32, "GQA": 8, "MQA": 1}
RATE = 9.0
JOBS = 500
VARIANTS = {
    "fcfs": ("fcfs", "proactive"),
    "paper": ("paper", "proactive"),
    "alpha 10 s": ("alpha 10 s", "proactive"),
    "recompute": ("alpha 10 s", "recompute"),
}
COLUMNS = ("mean", "p95", "jct", "ttft", "blocked", "gb_out", "gb_in", "recomputed", "peak_kv", "capacity")


def at(kind: str) -> dict[str, Case]:
    base = Case(kv_heads=HEADS[kind], batch=64, rate=RATE, jobs=JOBS, host_tokens=1 << 19)
    return {name: replace(under(order, base), kv=kv) for name, (order, kv) in VARIANTS.items()}


def cases(options: Options) -> list[Case]:
    return [case for kind in HEADS for case in at(kind).values()]


def report(rows: Rows) -> Report:
    tables = [sheet(rows, f"{kind}: {heads} KV heads", at(kind), COLUMNS, "fcfs") for kind, heads in HEADS.items()]
    return Report(tables, {kind: values(rows, at(kind), COLUMNS) for kind in HEADS}, lambda: _draw(rows))


def _draw(rows: Rows) -> Plot:
    plot, axes = panels(1, 3, width=3.2, height=2.8)
    width = 0.8 / len(VARIANTS)
    shown = (("mean", "mean latency (s/token)"), ("p95", "P95 (s/token)"), ("gb_in", "GB moved in"))
    for each, (column, title) in zip(axes, shown, strict=True):
        for place, name in enumerate(VARIANTS):
            bars = [centre(rows.of(at(kind)[name], column)) for kind in HEADS]
            xs = [index + (place - 1.5) * width for index in range(len(HEADS))]
            each.bar(xs, bars, width, color=COLOURS[name], label=name)
        each.set_xticks(range(len(HEADS)), list(HEADS))
        each.set(title=title)
    legend_below(plot, axes[0], len(VARIANTS))
    return plot


STUDY = Study("attention", cases, report)

if __name__ == "__main__":
    sys.exit(main(STUDY))
