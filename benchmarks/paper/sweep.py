"""Figures that are a few lines over the rate of arrival: latency in tables and a plot, and the rate at a limit."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle

from matplotlib.figure import Figure as Plot

from .curves import draw_line
from .figure import Curve, Figure, Options, Report, Table
from .intervals import interval
from .points import Point, Store
from .series import Series, complete, present, rate_at, ratio_of, series, spread
from .style import PALETTE, SHAPES, legend_below, limit_line, panels

MEAN, P95 = "mean_normalised_latency", "p95_normalised_latency"


@dataclass(frozen=True, slots=True)
class Line:
    """`base`: a point but for rate, seed and number of jobs. `rates` rise. `authors`: name of their curve."""

    name: str
    base: Point
    rates: tuple[float, ...]
    authors: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """Lines of one plot, over the same rates. The first one is what the others are compared with.

    `authors`: figure and path of theirs.
    """

    title: str
    lines: tuple[Line, ...]
    authors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sweep:
    """`limit_s`: latency per token at which rates are compared. `extra`: further numbers of each point, by the key of a
    point, with a factor and digits."""

    name: str
    panels: tuple[Panel, ...]
    limit_s: float = 0.3
    extra: Mapping[str, tuple[str, float, int]] | None = None
    top_s: float = 0.7

    def figure(self) -> Figure:
        return Figure(self.name, self.report, (self.points,))

    def points(self, options: Options, store: Store) -> list[Point]:
        return [point for seed in options.seeds for each in self.panels for point in _points(each, options, seed)]

    def report(self, options: Options, store: Store) -> Report:
        tables: list[Table] = []
        values: dict[str, object] = {"limit_s": self.limit_s}
        drawn: list[tuple[Panel, dict[str, Series], dict[str, Curve]]] = []
        for found in present(lambda panel: _Found(panel, options, store), self.panels):
            panel = found.panel
            means, p95s = found.series(MEAN), found.series(P95)
            theirs = options.authors(*panel.authors) if panel.authors else {}
            tables += [self._latency_table(found, means, p95s), self._rate_table(found, means, p95s, theirs)]
            values[panel.title] = {
                "seeds": found.seeds,
                **{
                    name: {"rates": list(curve.rates), "mean_s": list(curve.values), "p95_s": list(p95s[name].values)}
                    for name, curve in means.items()
                },
            }
            drawn.append((panel, means, theirs))
        return Report(tables, values, lambda: self._draw(drawn))

    def _latency_table(self, found: "_Found", means: dict[str, Series], p95s: dict[str, Series]) -> Table:
        extra = {title: (found.series(key), factor, digits) for title, (key, factor, digits) in self._extra().items()}
        rows = []
        first = means[found.panel.lines[0].name]
        for name, curve in means.items():
            for index, rate in enumerate(curve.rates):
                more = [
                    f"{interval(by_name[name].values[index])[0] * factor:.{digits}f}"
                    for by_name, factor, digits in extra.values()
                ]
                cells = [spread(curve.values[index]), spread(p95s[name].values[index])]
                ratio = ratio_of(curve.values[index], first.values[index], math.inf)
                rows.append([name, f"{rate:g}", *cells, ratio, *more])
        title = f"{found.panel.title}: latency per output token, s ({len(found.seeds)} seeds)"
        return Table(title, ["", "job/s", "mean", "P95", f"mean / {found.panel.lines[0].name}", *extra], rows)

    def _rate_table(
        self, found: "_Found", means: dict[str, Series], p95s: dict[str, Series], theirs: dict[str, Curve]
    ) -> Table:
        first = found.panel.lines[0].name
        rows = []
        for line in found.panel.lines:
            cells = []
            for curves in (means, p95s):
                at, least = (curves[name].crossings(self.limit_s) for name in (line.name, first))
                cells += [rate_at(at), ratio_of(at, least, max(line.rates)) if line.name != first else "1"]
            curve = theirs.get(line.authors)
            rate = Series(curve["x"], [[y] for y in curve["y"]]).crossings(self.limit_s)[0] if curve else math.nan
            rows.append(
                [line.name, *cells, "-" if math.isnan(rate) else "beyond" if math.isinf(rate) else f"{rate:.2f}"]
            )
        header = ["", "mean", "ratio", "P95", "ratio", "authors' mean"]
        return Table(f"{found.panel.title}: rate (job/s) at {self.limit_s:g} s/token", header, rows)

    def _extra(self) -> Mapping[str, tuple[str, float, int]]:
        return self.extra or {}

    def _draw(self, drawn: Sequence[tuple[Panel, dict[str, Series], dict[str, Curve]]]) -> Plot:
        plot, axes = panels(1, len(drawn), width=4.4, height=3.2)
        for (panel, means, theirs), each in zip(drawn, axes, strict=True):
            for line, colour, shape in zip(panel.lines, cycle(PALETTE), cycle(SHAPES)):
                draw_line(each, means[line.name], colour, shape, line.name)
                if line.authors in theirs:
                    points = theirs[line.authors]
                    each.plot(points["x"], points["y"], ":", color=colour, linewidth=1.2)
            limit_line(each, self.limit_s, f"{self.limit_s:g} s")
            most = max(max(line.rates) for line in panel.lines)
            each.set(xlabel="job/s", title=panel.title, ylim=(0, self.top_s), xlim=(0, most * 1.03))
        axes[0].set_ylabel("mean latency per token (s)")
        legend_below(plot, axes[0], min(len(drawn[0][0].lines), 4))
        return plot


class _Found:
    """A panel whose points are there."""

    def __init__(self, panel: Panel, options: Options, store: Store) -> None:
        self.panel, self._options, self._store = panel, options, store
        self.seeds = complete(store, options.seeds, lambda seed: _points(panel, options, seed))

    def series(self, key: str) -> dict[str, Series]:
        return {
            line.name: series(self._store, _base(line, self._options), self._options.some(line.rates), self.seeds, key)
            for line in self.panel.lines
        }


def _base(line: Line, options: Options) -> Point:
    return replace(line.base, jobs=options.jobs(line.base.jobs))


def _points(panel: Panel, options: Options, seed: int) -> list[Point]:
    return [
        replace(_base(line, options), rate=rate, seed=seed) for line in panel.lines for rate in options.some(line.rates)
    ]
