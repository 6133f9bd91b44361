"""Sensitivity to alpha, the time after which a job that has not run is promoted: at 92 and at 160 % of capacity."""

import sys

from matplotlib.figure import Figure as Plot

from .case import NEVER_S, Case
from .looks import COLOURS, curve
from .shared import legend_below, panels
from .sheets import sheet, values
from .study import Options, Report, Rows, Study, main

ALPHAS_S = (0.3, 1.0, 3.0, 10.0, 30.0, NEVER_S)
RATES = {1.7: "92 % of capacity", 3.0: "1.6 times capacity"}
COLUMNS = ("mean", "p95", "p99", "jct", "jct99", "ttft", "wait")
BASE = "10 s"


def at(rate: float) -> dict[str, Case]:
    return {_name(alpha_s): Case(rate=rate, jobs=250, alpha_s=alpha_s) for alpha_s in ALPHAS_S}


def _name(alpha_s: float) -> str:
    return "never" if alpha_s == NEVER_S else f"{alpha_s:g} s"


def cases(options: Options) -> list[Case]:
    return [case for rate in RATES for case in at(rate).values()]


def report(rows: Rows) -> Report:
    tables = [sheet(rows, f"{rate:g} job/s, {title}", at(rate), COLUMNS, BASE) for rate, title in RATES.items()]
    return Report(tables, {f"{rate:g}": values(rows, at(rate), COLUMNS) for rate in RATES}, lambda: _draw(rows))


def _draw(rows: Rows) -> Plot:
    plot, axes = panels(1, len(RATES), width=4.2, height=2.9)
    places = range(len(ALPHAS_S))
    for each, (rate, title) in zip(axes, RATES.items(), strict=True):
        for column, order in (("mean", "alpha 10 s"), ("p95", "paper"), ("p99", "fcfs")):
            by_alpha = [rows.of(case, column) for case in at(rate).values()]
            curve(each, places, by_alpha, COLOURS[order], {"mean": "mean", "p95": "P95", "p99": "P99"}[column])
        each.set_xticks(places, [_name(alpha_s) for alpha_s in ALPHAS_S])
        each.set(xlabel="alpha", title=title, ylim=(0, None))
    axes[0].set_ylabel("latency (s/token)")
    legend_below(plot, axes[0], 3)
    return plot


STUDY = Study("alpha", cases, report)

if __name__ == "__main__":
    sys.exit(main(STUDY))
