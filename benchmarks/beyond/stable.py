"""The studies once more where the system keeps up: long runs at 70, 85, 92 and 97 % of measured capacity.

Capacity is measured for each set-up (`Case.share`); the first 15 and the last 10 % of the jobs are left out. Bursts and
sustained overload have no stable version: they are about leaving and finding it again.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product

from matplotlib.figure import Figure as Plot

from . import alpha, attention, enst, link, mixing, profile_error, settings
from .case import Case
from .shared import PALETTE, Table, panels
from .sheets import DIGITS, RATIO_DIGITS, TITLES
from .study import Options, Report, Rows, Study, cell, centre, main

SHARES = (0.7, 0.85, 0.92, 0.97)
SHOWN = 0.92
"""Whose numbers stand beside the ratios."""

JOBS = 600
PLOT_COLUMNS = 4
LINE_STYLES = ("-", "--", ":")


@dataclass(frozen=True, slots=True)
class Set:
    """`base`: the row that others are compared with. `columns`: what is shown besides the ratios."""

    title: str
    cases: Mapping[str, Case]
    base: str
    columns: tuple[str, ...] = ("mean", "p99", "jct", "wait")


OF_ENST = ("mean", "wait", "gb_in", "enst_error_s")

SETS = (
    Set("alpha", alpha.at(0.0), alpha.BASE),
    *(Set(name, cases, settings.DEFAULTS[name]) for name, cases in settings.SWEEPS.items()),
    *(Set(f"{size} jobs a batch", settings.batches(size), "fcfs") for size in settings.BATCHES),
    *(Set(f"profile, {load}", profile_error.at(load), profile_error.BASE) for load in profile_error.LOADS),
    *(Set(f"ENST, {order}", enst.at(order), "order", OF_ENST) for order in enst.BASES),
    Set("link", link.CASES, link.BASE, ("mean", "wait", "gb_in", "recomputed")),
    *(Set(kind, attention.at(kind), "fcfs", ("mean", "jct", "gb_in", "recomputed")) for kind in attention.HEADS),
    Set("chunks", mixing.at(0.0), mixing.BASE, ("mean", "jct", "ttft", "itl99")),
)


def steady(case: Case, share: float) -> Case:
    return replace(case, rate=0.0, share=share, jobs=JOBS, window=True)


def sets(options: Options) -> list[Set]:
    """Chosen by --only; the first one when it has to be quick."""
    chosen = [each for each in SETS if not options.only or each.title in options.only]
    return chosen[:1] if options.quick else chosen


def cases(options: Options) -> list[Case]:
    return [steady(case, share) for each in sets(options) for share in SHARES for case in each.cases.values()]


def report(rows: Rows) -> Report:
    found = [each for each in SETS if rows.of(steady(each.cases[each.base], SHOWN), "mean")]
    values = {each.title: _values(rows, each) for each in found}
    return Report([_table(rows, each) for each in found], {"shares": SHARES, **values}, lambda: _draw(rows, found))


def _table(rows: Rows, each: Set) -> Table:
    body = []
    for name, case in each.cases.items():
        shown = steady(case, SHOWN)
        ratios = [_ratio(rows, each, case, share) for share in SHARES]
        numbers = [cell(rows.of(shown, column), DIGITS[column]) for column in each.columns]
        body.append([f"{name} ({len(rows.each(shown))})", *ratios, *numbers])
    titles = [f"{TITLES.get(column, column)} at {SHOWN:.0%}" for column in each.columns]
    return Table(
        f"{each.title}: mean / P95 over those of {each.base}", ["(seeds)", *(f"{s:.0%}" for s in SHARES), *titles], body
    )


def _ratio(rows: Rows, each: Set, case: Case, share: float) -> str:
    base = each.cases[each.base]
    if case == base:
        return "1"
    pair = [rows.ratios(steady(case, share), steady(base, share), column) for column in ("mean", "p95")]
    return " / ".join(cell(ratios, RATIO_DIGITS) for ratios in pair)


def _values(rows: Rows, each: Set) -> dict[str, object]:
    """By row and column: a list of seeds for each share."""
    return {
        name: {column: [rows.of(steady(case, share), column) for share in SHARES] for column in ("p95", *each.columns)}
        for name, case in each.cases.items()
    }


def _draw(rows: Rows, found: list[Set]) -> Plot:
    plot, axes = panels(-(-len(found) // PLOT_COLUMNS), min(len(found), PLOT_COLUMNS), width=2.9, height=2.3)
    for each, ax in zip(found, axes, strict=False):
        base = each.cases[each.base]
        for (name, case), (style, colour) in zip(each.cases.items(), product(LINE_STYLES, PALETTE), strict=False):
            ratios = [centre(rows.ratios(steady(case, share), steady(base, share), "mean")) for share in SHARES]
            ax.plot(
                [100 * share for share in SHARES], ratios, style, color=colour, marker="o", markersize=3, label=name
            )
        ax.set(xlabel="% of capacity", title=each.title, yscale="log")
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter("{x:g}")
        ax.tick_params(axis="y", which="both", labelsize=6)
        ax.legend(fontsize=5, frameon=False, ncols=2 if len(each.cases) > 6 else 1)
    for ax in axes[len(found) :]:
        ax.set_visible(False)
    for ax in axes[::PLOT_COLUMNS]:
        ax.set_ylabel("mean over that of the base")
    return plot


STUDY = Study("stable", cases, report)

if __name__ == "__main__":
    sys.exit(main(STUDY))
