"""What the figures' commands have in common: options, running, and the three files each of them leaves.

    python -m benchmarks.paper.fig11 --out DIR [--workloads DIR] [--seeds 3] [--processes 2] [--seconds 150] [--quick]

DIR gets NAME.json (numbers), NAME.md (tables) and NAME.png (most figures), and points.jsonl, to which every figure adds
what it simulates. A command that is stopped, or ends after --seconds, goes on where it was when it is given again.
"""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from matplotlib.figure import Figure as Plot

from .points import Point, Store, run_all
from .series import MissingError
from .style import save

NUMBERS = "paper_figure_numbers.json"
"""What the authors typed into the plotting notebook of github.com/LLMServe/FastServe, by figure."""

QUICK_JOBS = 16
SEEDS, QUICK_SEEDS = 3, 1

Curve = dict[str, list[float]]


def rising(curve: Curve) -> Curve:
    """Sorted by x; the first of several points at one x."""
    by_x: dict[float, float] = {}
    for x, y in zip(curve["x"], curve["y"], strict=True):
        by_x.setdefault(x, y)
    return {"x": sorted(by_x), "y": [by_x[x] for x in sorted(by_x)]}


@dataclass(frozen=True, slots=True)
class Options:
    out: Path
    quick: bool
    workloads: Path | None
    seeds: range
    processes: int
    seconds: float
    partial: bool

    def jobs(self, number: int) -> int:
        return QUICK_JOBS if self.quick else number

    def some(self, values: Sequence[float]) -> list[float]:
        """All of them, or the ends when it has to be quick."""
        return [values[0], values[-1]] if self.quick and len(values) > 2 else list(values)

    def authors(self, figure: str, *path: str) -> dict[str, Curve]:
        """Curves by system, `x` and `y`; none when no folder with them was given."""
        if self.workloads is None:
            return {}
        found = json.loads((self.workloads / NUMBERS).read_text())[figure]
        for name in path:
            found = found[name]
        return {name: rising(curve) for name, curve in found.items()}


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        lines = [self.header, ["---"] * len(self.header), *self.rows]
        return f"**{self.title}**\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


@dataclass(frozen=True, slots=True)
class Report:
    """`values`: the numbers of the tables, JSON-ready. `draw`: makes the plot."""

    tables: Sequence[Table]
    values: dict[str, object]
    draw: Callable[[], Plot] | None = None


#: Points that must be measured before the next stage, or the report, can be asked for.
Stage = Callable[[Options, Store], list[Point]]


@dataclass(frozen=True, slots=True)
class Figure:
    name: str
    report: Callable[[Options, Store], Report]
    stages: Sequence[Stage] = field(default_factory=tuple)


def main(figure: Figure, arguments: Sequence[str] | None = None) -> int:
    """0 when the files are written, 1 when time was up before."""
    options = parse(figure.name, arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    store = Store(options.out / "points.jsonl")
    for stage in figure.stages:
        points = stage(options, store)
        missing = run_all(points, store, processes=options.processes, seconds=options.seconds)
        if missing:
            print(f"{figure.name}: {missing} of {len(points)} points are missing; run it again to go on")
            if not options.partial:
                return 1
    try:
        write(figure.name, figure.report(options, store), options.out)
    except MissingError as error:
        print(f"{figure.name}: {error}")
        return 1
    return 0


def write(name: str, report: Report, out: Path) -> None:
    values = {"figure": name, **report.values}
    (out / f"{name}.json").write_text(json.dumps(values, indent=1, default=str) + "\n")
    (out / f"{name}.md").write_text("\n".join(table.markdown() for table in report.tables))
    if report.draw is not None:
        save(report.draw(), out / f"{name}.png")


def parse(name: str, arguments: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(prog=name)
    parser.add_argument("--out", type=Path, required=True, help="folder for results")
    parser.add_argument("--workloads", type=Path, help=f"folder with {NUMBERS}, to draw the authors' points as well")
    parser.add_argument("--seeds", type=int, help=f"runs per point, paired between policies (default {SEEDS})")
    parser.add_argument("--processes", type=int, default=2, help="simulations at a time (default 2)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no simulation after so long")
    parser.add_argument("--partial", action="store_true", help="report on the seeds that are complete")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: proves that the command works, no more")
    given = parser.parse_args(arguments)
    seeds = range(1, 1 + (given.seeds or (QUICK_SEEDS if given.quick else SEEDS)))
    return Options(given.out, given.quick, given.workloads, seeds, given.processes, given.seconds, given.partial)
