"""Sensitivity to the first quantum, the ratio of quanta, the number of queues and the batch size: skip-join, alpha
10 s, at 1.6 times capacity."""

import sys
from dataclasses import replace

from matplotlib.figure import Figure as Plot

from .case import Case
from .looks import COLOURS, curve
from .orders import under
from .shared import legend_below, panels
from .sheets import sheet, values
from .study import Options, Report, Rows, Study, main

BASE = Case(rate=3.0, jobs=250)
FIRST_QUANTA = (0.25, 1.0, 8.0, 32.0)
RATIOS = (2, 4, 8)
LEVELS = (1, 3, 6, 10)
BATCHES = {4: 0.9, 16: 3.0, 64: 9.0}
"""Size to job/s, each about 1.6 times what it can take."""

COLUMNS = ("mean", "p95", "p99", "jct", "jct99", "ttft", "wait")

SWEEPS: dict[str, dict[str, Case]] = {
    "first quantum": {f"{x:g}": replace(BASE, decode_factor=x) for x in FIRST_QUANTA},
    "ratio": {f"{x}": replace(BASE, ratio=x) for x in RATIOS},
    "queues": {f"{x}": replace(BASE, levels=x) for x in LEVELS},
}
DEFAULTS = {"first quantum": "1", "ratio": "2", "queues": "10"}


def batches(size: int) -> dict[str, Case]:
    base = Case(rate=BATCHES[size], batch=size, jobs={4: 120, 16: 250, 64: 500}[size])
    return {order: under(order, base) for order in ("fcfs", "paper", "alpha 10 s", "srpt")}


def cases(options: Options) -> list[Case]:
    swept = [case for sweep in SWEEPS.values() for case in sweep.values()]
    return swept + [case for size in BATCHES for case in batches(size).values()]


def report(rows: Rows) -> Report:
    tables = [sheet(rows, name, sweep, COLUMNS, DEFAULTS[name]) for name, sweep in SWEEPS.items()]
    tables += [
        sheet(rows, f"{size} jobs a batch, {rate:g} job/s", batches(size), (*COLUMNS, "capacity"), "fcfs")
        for size, rate in BATCHES.items()
    ]
    found: dict[str, object] = {name: values(rows, sweep, COLUMNS) for name, sweep in SWEEPS.items()}
    found |= {f"batch {size}": values(rows, batches(size), COLUMNS) for size in BATCHES}
    return Report(tables, found, lambda: _draw(rows))


def _draw(rows: Rows) -> Plot:
    plot, axes = panels(1, len(SWEEPS), width=3.2, height=2.8)
    for each, (name, sweep) in zip(axes, SWEEPS.items(), strict=True):
        for column, order, label in (("mean", "alpha 10 s", "mean"), ("p95", "paper", "P95"), ("p99", "fcfs", "P99")):
            by_value = [rows.of(case, column) for case in sweep.values()]
            curve(each, range(len(sweep)), by_value, COLOURS[order], label)
        each.set_xticks(range(len(sweep)), list(sweep))
        each.set(xlabel=name, ylim=(0, None))
    axes[0].set_ylabel("latency (s/token)")
    legend_below(plot, axes[0], 3)
    return plot


STUDY = Study("settings", cases, report)

if __name__ == "__main__":
    sys.exit(main(STUDY))
