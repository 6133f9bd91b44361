"""The same comparisons where the system keeps up: long runs at 70, 85, 92 and 97 % of measured capacity.

The second protocol of the figures. Capacity is what first come, first served completes when everybody is there from
the start, of each system and load its own. The first 15 and the last 10 % of the jobs are left out, so that neither
filling up nor running empty is measured. What is compared is in comparisons.py.
"""

import math
import sys
from dataclasses import dataclass, replace
from itertools import cycle

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Plot

from .comparisons import GROUPS, Comparison
from .figure import Figure, Options, Report, Table, main
from .intervals import interval, ratios
from .points import Point, Store
from .series import complete, present, ratio_of
from .style import COLOURS, LABELS, MARKERS, PALETTE, SHAPES, SLO_COLOUR, panels

LOADS = (0.7, 0.85, 0.92, 0.97)
SHOWN = 0.92
"""Whose numbers are in the tables beside the ratios."""

AGAINST = ("mean_normalised_latency", "p99_normalised_latency")
PLOT_COLUMNS = 4
FLOOR, CEILING = 0.08, 3.0
"""Of a plot: FCFS is at 1."""


def groups(options: Options) -> dict[str, tuple[Comparison, ...]]:
    """Two lines of one comparison of each kind when it has to be quick."""
    return {title: (group[0].shortened(),) if options.quick else group for title, group in GROUPS.items()}


def everything(options: Options) -> list[Comparison]:
    return [comparison for group in groups(options).values() for comparison in group]


def saturated(options: Options, store: Store) -> list[Point]:
    return [_sized(comparison.saturated, options) for comparison in everything(options)]


def _sized(point: Point, options: Options) -> Point:
    return replace(point, jobs=options.jobs(point.jobs))


def rate_of(comparison: Comparison, load: float, options: Options, store: Store) -> float:
    """Jobs per second. Raises KeyError when capacity has not been measured."""
    return round(load * store.number(_sized(comparison.saturated, options), "capacity"), 4)


def at(comparison: Comparison, load: float, seed: int, options: Options, store: Store) -> list[Point]:
    rate = rate_of(comparison, load, options, store)
    return [replace(_sized(line, options), rate=rate, seed=seed) for line in comparison.lines.values()]


def points(options: Options, store: Store) -> list[Point]:
    return [
        point
        for comparison in everything(options)
        for seed in options.seeds
        for load in options.some(LOADS)
        for point in at(comparison, load, seed, options, store)
    ]


@dataclass(frozen=True, slots=True)
class Found:
    """A comparison whose runs are there: `runs[load][name]` has one for each seed."""

    comparison: Comparison
    seeds: list[int]
    runs: dict[float, dict[str, list[Point]]]

    @property
    def first(self) -> str:
        return next(iter(self.comparison.lines))


def found(comparison: Comparison, options: Options, store: Store) -> Found:
    """Raises MissingError while no seed has all of its runs."""
    loads = options.some(LOADS)
    seeds = complete(
        store, options.seeds, lambda seed: [p for load in loads for p in at(comparison, load, seed, options, store)]
    )
    runs = {}
    for load in loads:
        by_seed = [at(comparison, load, seed, options, store) for seed in seeds]
        runs[load] = dict(zip(comparison.lines, map(list, zip(*by_seed, strict=True)), strict=True))
    return Found(comparison, seeds, runs)


def report(options: Options, store: Store) -> Report:
    tables: list[Table] = []
    values: dict[str, object] = {"loads": options.some(LOADS)}
    drawn: list[Found] = []
    for title, group in groups(options).items():
        each = present(lambda comparison: found(comparison, options, store), group)
        tables += [_ratios(title, each, store), *_numbers(title, each, store)]
        values[title] = {one.comparison.title: _values(one, options, store) for one in each}
        drawn += each
    return Report(tables, values, lambda: _draw(drawn, store))


def _ratios(title: str, group: list[Found], store: Store) -> Table:
    """Mean and P99 over those of the first line, by load."""
    rows = []
    for each in group:
        for name in list(each.comparison.lines)[1:]:
            cells = []
            for runs in each.runs.values():
                numbers = [
                    [[store.number(run, key) for run in runs[line]] for line in (name, each.first)] for key in AGAINST
                ]
                cells.append(" / ".join(ratio_of(above, below, math.inf) for above, below in numbers))
            rows.append([f"{each.comparison.title} ({len(each.seeds)})", LABELS.get(name, name), *cells])
    first = LABELS.get(group[0].first, group[0].first)
    header = ["(seeds)", f"mean / P99 over those of {first}", *(f"{load:.0%}" for load in group[0].runs)]
    return Table(title, header, rows)


def _numbers(title: str, group: list[Found], store: Store) -> list[Table]:
    """What they are at one load; nothing when that was not run."""
    if SHOWN not in group[0].runs:
        return []
    columns = group[0].comparison.columns
    rows = []
    for each in group:
        for name, runs in each.runs[SHOWN].items():
            cells = [
                f"{interval([store.number(run, *key.split('/')) for run in runs])[0] * factor:.{digits}f}"
                for key, factor, digits in columns.values()
            ]
            rows.append([f"{each.comparison.title} ({len(each.seeds)})", LABELS.get(name, name), *cells])
    return [Table(f"{title}: at {SHOWN:.0%}, means over the seeds", ["(seeds)", "", *columns], rows)]


def _values(each: Found, options: Options, store: Store) -> dict[str, object]:
    """By line and number: one list of seeds for each load."""
    by_line = {
        name: {
            column: [[store.number(run, *key.split("/")) * factor for run in runs[name]] for runs in each.runs.values()]
            for column, (key, factor, _) in each.comparison.columns.items()
        }
        for name in each.comparison.lines
    }
    rates = [rate_of(each.comparison, load, options, store) for load in each.runs]
    return {"seeds": each.seeds, "rates": rates, **by_line}


def _draw(drawn: list[Found], store: Store) -> Plot:
    rows = -(-len(drawn) // PLOT_COLUMNS)
    plot, axes = panels(rows, min(len(drawn), PLOT_COLUMNS), width=2.9, height=2.2)
    for each, ax in zip(drawn, axes, strict=False):
        _curves(ax, each, store)
    for ax in axes[len(drawn) :]:
        ax.set_visible(False)
    for ax in axes[::PLOT_COLUMNS]:
        ax.set_ylabel("mean / first line's")
    return plot


def _curves(ax: Axes, each: Found, store: Store) -> None:
    others = list(each.comparison.lines)[1:]
    for name, colour, shape in zip(others, cycle(PALETTE[1:]), cycle(SHAPES)):
        shares = [interval(_paired(runs[name], runs[each.first], store))[0] for runs in each.runs.values()]
        ax.plot(
            [100 * load for load in each.runs],
            [min(max(share, FLOOR), CEILING) for share in shares],
            color=COLOURS.get(name, colour),
            marker=MARKERS.get(name, shape),
            markersize=3.5,
            linewidth=1.2,
            label=LABELS.get(name, name),
        )
    ax.axhline(1, color=SLO_COLOUR, linewidth=0.9, linestyle="--")
    ax.set(yscale="log", ylim=(FLOOR, CEILING), xlabel="% of capacity")
    ax.set_yticks([0.1, 0.2, 0.5, 1, 2], ["0.1", "0.2", "0.5", "1", "2"])
    ax.minorticks_off()
    ax.set_title(each.comparison.title)
    ax.legend(fontsize=5.5, frameon=False)


def _paired(above: list[Point], below: list[Point], store: Store) -> list[float]:
    mean = AGAINST[0]
    return ratios([store.number(p, mean) for p in above], [store.number(p, mean) for p in below])


FIGURE = Figure("stable", report, (saturated, points))

if __name__ == "__main__":
    sys.exit(main(FIGURE))
