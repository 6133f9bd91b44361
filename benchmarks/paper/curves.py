"""Figures 11, 12 and 13: three models on two data sets over the rate of arrival. The paper's protocol: 400 jobs, all of
them counted, also beyond capacity, where the result is a transient that grows with the number of jobs."""

import math
from dataclasses import dataclass, replace

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Plot

from .figure import Curve, Options, Report, Table
from .points import Point, Store
from .series import Series, complete, present, rate_at, ratio_of, series, spread
from .style import COLOURS, LABELS, MARKERS, legend_below, limit_line, panels

SLO_S = 0.3
"""Latency per output token, mean or P95, of figures 11 and 12."""

RATES: dict[tuple[str, str], tuple[float, ...]] = {
    ("sharegpt", "opt-13b"): (1.5, 2, 2.5, 3.5, 5),
    ("sharegpt", "opt-66b"): (0.8, 1.3, 2, 3.5),
    ("sharegpt", "opt-175b"): (1, 1.5, 2.2, 3.3),
    ("alpaca", "opt-13b"): (8, 12, 16, 22, 33),
    ("alpaca", "opt-66b"): (4, 6.5, 9, 13, 20),
    ("alpaca", "opt-175b"): (6, 9, 12, 18, 26),
}
ORDERS = ("fcfs", "paper", "alpha-10s")
AUTHORS_NAMES = {"fcfs": "FastServe-FCFS", "paper": "FastServe"}
BLANK = "-"
COLUMNS = 3
"""Of a plot."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One model on one data set: a curve per order, and the authors' own by their names."""

    load: str
    system: str
    seeds: list[int]
    curves: dict[str, Series]
    authors: dict[str, Curve]

    @property
    def name(self) -> str:
        return f"{self.system.upper()} {self.load}"

    def authors_rate(self, order: str) -> float:
        """Where the authors' own points cross the limit; not a number when there are none."""
        curve = self.authors.get(AUTHORS_NAMES[order])
        return Series(curve["x"], [[y] for y in curve["y"]]).crossings(SLO_S)[0] if curve else math.nan


def orders_of(system: str) -> tuple[str, ...]:
    """Our alpha is judged with the smallest model alone: simulating the others takes longer and shows the same."""
    return ORDERS if system == "opt-13b" else ORDERS[:2]


def panel_points(load: str, system: str, seed: int, options: Options) -> list[Point]:
    return [
        Point(system, order, load, rate, seed, options.jobs(400))
        for rate in options.some(RATES[load, system])
        for order in orders_of(system)
    ]


def curve_points(options: Options, loads: tuple[str, ...]) -> list[Point]:
    cells = [(load, system) for load, system in RATES if load in loads]
    return [
        point for seed in options.seeds for load, system in cells for point in panel_points(load, system, seed, options)
    ]


def panel(options: Options, store: Store, load: str, system: str, metric: str, figure: str) -> Panel:
    seeds = complete(store, options.seeds, lambda seed: panel_points(load, system, seed, options))
    base = Point(system, "", load, 0, 0, options.jobs(400))
    rates = options.some(RATES[load, system])
    return Panel(
        load,
        system,
        seeds,
        {order: series(store, replace(base, order=order), rates, seeds, metric) for order in orders_of(system)},
        options.authors(f"{figure}_{load}_{metric.split('_')[0]}", system.replace("-", "")),
    )


def curves_report(options: Options, store: Store, metric: str, loads: tuple[str, ...], figure: str) -> Report:
    """`figure`: fig11 or fig12, as the authors' numbers are named."""
    statistic = metric.split("_")[0]
    cells = [(load, system) for load, system in RATES if load in loads]
    found = present(lambda cell: panel(options, store, *cell, metric, figure), cells)
    values: dict[str, object] = {"metric": metric, "slo_s": SLO_S}
    for each in found:
        values[each.name] = {
            "seeds": each.seeds,
            "rates": list(each.curves["fcfs"].rates),
            "latency_s": {order: list(curve.values) for order, curve in each.curves.items()},
            "rate_at_slo": {order: curve.crossings(SLO_S) for order, curve in each.curves.items()},
        }
    return Report(
        [_slo_table(found, statistic), _points_table(found, statistic)], values, lambda: _draw(found, statistic)
    )


def _slo_table(found: list[Panel], statistic: str) -> Table:
    rows = []
    for each in found:
        largest = max(each.curves["fcfs"].rates)
        at = {order: curve.crossings(SLO_S) for order, curve in each.curves.items()}
        fcfs, paper = each.authors_rate("fcfs"), each.authors_rate("paper")
        rows.append(
            [
                f"{each.name} ({len(each.seeds)})",
                *(rate_at(at[order]) if order in at else BLANK for order in ORDERS),
                *(ratio_of(at[order], at["fcfs"], largest) if order in at else BLANK for order in ORDERS[1:]),
                *(f"{value:.2f}" for value in (fcfs, paper, paper / fcfs)),
            ]
        )
    title = f"Rate (job/s) at which the {statistic} reaches {SLO_S} s/token"
    header = ["(seeds)", *(LABELS[order] for order in ORDERS), "0.3 s / FCFS", "10 s / FCFS"]
    return Table(title, [*header, "authors' FCFS", "authors' FastServe", "their ratio"], rows)


def _points_table(found: list[Panel], statistic: str) -> Table:
    rows = []
    for each in found:
        for index, rate in enumerate(each.curves["fcfs"].rates):
            at = {order: curve.values[index] for order, curve in each.curves.items()}
            cells = [spread(at[order]) if order in at else BLANK for order in ORDERS]
            rows.append([each.name, f"{rate:g}", *cells, ratio_of(at["paper"], at["fcfs"], math.inf)])
    header = ["", "job/s", *(LABELS[order] for order in ORDERS), "0.3 s / FCFS"]
    return Table(f"Latency per output token, {statistic}, s", header, rows)


def _draw(found: list[Panel], statistic: str) -> Plot:
    rows, columns = -(-len(found) // COLUMNS), min(len(found), COLUMNS)
    plot, axes = panels(rows, columns, width=3.2, height=2.4)
    for each, ax in zip(found, axes, strict=False):
        for order, series_ in each.curves.items():
            draw_series(ax, order, series_)
        for order, name in AUTHORS_NAMES.items():
            if name in each.authors:
                curve = each.authors[name]
                ax.plot(curve["x"], curve["y"], ":", color=COLOURS[order], linewidth=1.2, label=f"authors' {name}")
        limit_line(ax, SLO_S, "0.3 s")
        ax.set(ylim=(0, 2.2 * SLO_S), xlim=(0, max(RATES[each.load, each.system])), xlabel="job/s", title=each.name)
    for ax in axes[::columns]:
        ax.set_ylabel(f"{statistic} latency (s/token)")
    for ax in axes[len(found) :]:
        ax.set_visible(False)
    legend_below(plot, axes[0], 5)
    return plot


def draw_series(axes: Axes, order: str, curve: Series) -> None:
    draw_line(axes, curve, COLOURS[order], MARKERS[order], LABELS[order])


def draw_line(axes: Axes, curve: Series, colour: str, marker: str, label: str) -> None:
    """Means with their intervals."""
    axes.errorbar(
        curve.rates,
        curve.means(),
        yerr=curve.halves(),
        color=colour,
        marker=marker,
        markersize=4,
        linewidth=1.4,
        elinewidth=0.8,
        capsize=2,
        label=label,
    )
