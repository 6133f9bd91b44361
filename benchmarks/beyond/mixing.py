"""Prompts and decodes in one iteration: whole prompts, and chunks whose budget counts prompt tokens only.

Lognormal lengths with four times as much input as output (819 and 205 tokens on average), 16 jobs a
batch. `token gap P99`: of all times between two tokens of an answer, preemption included.
"""

import sys

from matplotlib.figure import Figure as Plot

from .case import Case
from .looks import COLOURS, curve
from .orders import under
from .shared import legend_below, panels
from .sheets import sheet, values
from .study import Options, Report, Rows, Study, main

CHUNKS = {0: "whole", 512: "512", 256: "256", 128: "128"}
RATES = (2.2, 3.0)
ORDERS = ("fcfs", "alpha 10 s")
BASE = "alpha 10 s, whole"
COLUMNS = ("mean", "p95", "jct", "ttft", "itl99", "capacity")


def at(rate: float) -> dict[str, Case]:
    return {
        f"{order}, {name}": under(order, Case(load="ratio:4", rate=rate, jobs=250, chunk=chunk))
        for order in ORDERS
        for chunk, name in CHUNKS.items()
    }


def cases(options: Options) -> list[Case]:
    return [case for rate in RATES for case in at(rate).values()]


def report(rows: Rows) -> Report:
    tables = [sheet(rows, f"{rate:g} job/s", at(rate), COLUMNS, BASE) for rate in RATES]
    return Report(tables, {f"{rate:g}": values(rows, at(rate), COLUMNS) for rate in RATES}, lambda: _draw(rows))


def _draw(rows: Rows) -> Plot:
    plot, axes = panels(1, 3, width=3.2, height=2.8)
    shown = (("mean", "mean latency (s/token)"), ("ttft", "first token (s)"), ("itl99", "token gap P99 (s)"))
    found = at(RATES[0])
    for each, (column, title) in zip(axes, shown, strict=True):
        for order in ORDERS:
            by_chunk = [rows.of(found[f"{order}, {name}"], column) for name in CHUNKS.values()]
            curve(each, range(len(CHUNKS)), by_chunk, COLOURS[order], order)
        each.set_xticks(range(len(CHUNKS)), list(CHUNKS.values()))
        each.set(xlabel="prompt tokens of a chunk", title=title, ylim=(0, None))
    legend_below(plot, axes[0], 2)
    return plot


STUDY = Study("mixing", cases, report)

if __name__ == "__main__":
    sys.exit(main(STUDY))
