"""A wrong profile: half or twice the true times, for prompts, for decodes (which set the first quantum), for both, and
each prefill point off by its own random factor up to two. Skip-join, alpha 10 s, with prompts of 118 and 964 tokens."""

import sys
from dataclasses import replace

from matplotlib.figure import Figure as Plot

from .case import Case
from .looks import COLOURS, curve
from .shared import legend_below, panels
from .sheets import sheet, values
from .study import Options, Report, Rows, Study, main

LOADS = {
    "short prompts": Case(rate=3.0, jobs=250),
    "long prompts": Case(load="ratio:16", rate=4.2),
}
"""1.6 times capacity, and 0.8 of it."""

ERRORS: dict[str, tuple[float, float, float]] = {
    "true": (1.0, 1.0, 1.0),
    "prompts x 0.5": (0.5, 1.0, 1.0),
    "prompts x 2": (2.0, 1.0, 1.0),
    "decodes x 0.5": (1.0, 0.5, 1.0),
    "decodes x 2": (1.0, 2.0, 1.0),
    "both x 0.5": (0.5, 0.5, 1.0),
    "both x 2": (2.0, 2.0, 1.0),
    "noise up to 2": (1.0, 1.0, 2.0),
}
"""Factors of prefills and decodes, and the largest random one of a prefill point."""

COLUMNS = ("mean", "p95", "p99", "jct", "ttft", "wait")
BASE = "true"


def at(load: str) -> dict[str, Case]:
    return {
        name: replace(LOADS[load], prefill_factor=prefills, decode_factor=decodes, profile_noise=noise)
        for name, (prefills, decodes, noise) in ERRORS.items()
    }


def cases(options: Options) -> list[Case]:
    return [case for load in LOADS for case in at(load).values()]


def report(rows: Rows) -> Report:
    tables = [sheet(rows, load, at(load), COLUMNS, BASE) for load in LOADS]
    return Report(tables, {load: values(rows, at(load), COLUMNS) for load in LOADS}, lambda: _draw(rows))


def _draw(rows: Rows) -> Plot:
    plot, axes = panels(1, len(LOADS), width=4.4, height=3.2)
    for each, load in zip(axes, LOADS, strict=True):
        found = at(load)
        for column, colour, sign in (("mean", COLOURS["alpha 10 s"], "o"), ("p95", COLOURS["paper"], "s")):
            ratios = [rows.ratios(case, found[BASE], column) for case in found.values()]
            curve(each, range(len(found)), ratios, colour, {"mean": "mean", "p95": "P95"}[column], sign)
        each.set_xticks(range(len(found)), list(found), rotation=40, ha="right")
        each.set(title=load, ylim=(0.5, 1.5))
    axes[0].set_ylabel("latency over that with the truth")
    legend_below(plot, axes[0], 2)
    return plot


STUDY = Study("profile_error", cases, report)

if __name__ == "__main__":
    sys.exit(main(STUDY))
