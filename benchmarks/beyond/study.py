"""What the studies' commands have in common: options, running in pieces, and the files each of them leaves.

    python -m benchmarks.beyond.alpha --out DIR [--traces DIR] [--seeds 3] [--seconds 150] [--quick]

DIR gets NAME.json (numbers), NAME.md (a table) and mostly NAME.png, and runs.jsonl, to which every study adds what it
simulates and in which it finds what others have. A command that is stopped, or ends after --seconds, goes on where it
was when it is given again. Policies are compared on the same arrivals, seed by seed.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from matplotlib.figure import Figure as Plot

from .case import Case
from .measure import Row, measure
from .shared import Table, interval, save

QUICK_JOBS = 8
QUICK_SEEDS = 2


@dataclass(frozen=True, slots=True)
class Options:
    out: Path
    quick: bool
    traces: Path | None
    seeds: range
    seconds: float
    partial: bool
    only: tuple[str, ...] = ()

    def sized(self, case: Case) -> Case:
        """As it is, or few jobs with short answers when it has to be quick."""
        if not self.quick:
            return case
        pattern = tuple((seconds / 20, rate) for seconds, rate in case.pattern)
        load = "alpaca" if case.load == "sharegpt" else case.load
        return replace(case, jobs=QUICK_JOBS, pattern=pattern, load=load)


class Rows:
    """Measured cases in a file of JSON lines, appended one by one; two commands may write to it at a time."""

    def __init__(self, path: Path, options: Options) -> None:
        self._path, self._options = path, options
        self._rows: dict[str, Row] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                row = json.loads(line)
                self._rows[row.pop("case")] = row

    def run(self, cases: Iterable[Case]) -> int:
        """Measure what is missing, a seed of all before the next. Returns how many are missing still."""
        options, until_s = self._options, time.monotonic() + self._options.seconds
        wanted = [options.sized(replace(case, seed=seed)) for seed in options.seeds for case in cases]
        missing = [case for case in dict.fromkeys(wanted) if case.key() not in self._rows]
        for index, case in enumerate(missing):
            if time.monotonic() > until_s:
                return len(missing) - index
            row = measure(case, options.traces)
            with self._path.open("a") as file:
                file.write(json.dumps({"case": case.key(), **row}) + "\n")
            self._rows[case.key()] = row
        return 0

    def each(self, case: Case) -> list[Row]:
        """The case by seed, as far as it is measured; seeds from the first missing one on are left out."""
        found = []
        for seed in self._options.seeds:
            key = self._options.sized(replace(case, seed=seed)).key()
            if key not in self._rows:
                break
            found.append(self._rows[key])
        return found

    def of(self, case: Case, name: str) -> list[float]:
        """One number of the case by seed."""
        return [number(row, name) for row in self.each(case)]

    def at(self, case: Case, name: str, index: int) -> list[float]:
        """One number of a list of the case, by seed."""
        return [numbers(row, name)[index] for row in self.each(case)]

    def ratios(self, case: Case, base: Case, name: str) -> list[float]:
        """Seed by seed, of the seeds that both have."""
        pairs = zip(self.of(case, name), self.of(base, name), strict=False)
        return [above / below for above, below in pairs if below]


def number(row: Row, name: str) -> float:
    value = row[name]
    assert not isinstance(value, list)
    return value


def numbers(row: Row, name: str) -> list[float]:
    value = row[name]
    assert isinstance(value, list)
    return value


def cell(values: Sequence[float], digits: int = 3) -> str:
    """`mean±half` of the 95 % interval over seeds; two seeds have none and are given both; a dash for no value."""
    if not values:
        return "-"
    if len(values) == 2:
        return f"{values[0]:.{digits}f}, {values[1]:.{digits}f}"
    centre, half = interval(values)
    return f"{centre:.{digits}f}" if math.isnan(half) else f"{centre:.{digits}f}±{half:.{digits}f}"


def centre(values: Sequence[float]) -> float:
    return interval(values)[0] if values else math.nan


@dataclass(frozen=True, slots=True)
class Report:
    """`values`: what the tables show, JSON-ready. `draw`: makes the plot."""

    tables: Sequence[Table]
    values: dict[str, object]
    draw: Callable[[], Plot] | None = None


@dataclass(frozen=True, slots=True)
class Study:
    """`cases`: what to simulate, for each seed."""

    name: str
    cases: Callable[[Options], Sequence[Case]]
    report: Callable[[Rows], Report]


def main(study: Study, arguments: Sequence[str] | None = None) -> int:
    """0 when the files are written, 1 when time was up before."""
    options = parse(study.name, arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    rows = Rows(options.out / "runs.jsonl", options)
    missing = rows.run(study.cases(options))
    if missing:
        print(f"{study.name}: {missing} runs are missing; run it again to go on")
        if not options.partial:
            return 1
    write(study.name, study.report(rows), options.out)
    return 0


def write(name: str, report: Report, out: Path) -> None:
    values = {"study": name, **report.values}
    (out / f"{name}.json").write_text(json.dumps(values, indent=1) + "\n")
    (out / f"{name}.md").write_text("\n".join(table.markdown() for table in report.tables))
    if report.draw is not None:
        save(report.draw(), out / f"{name}.png")


def parse(name: str, arguments: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(prog=name)
    parser.add_argument("--out", type=Path, required=True, help="folder for results")
    parser.add_argument(
        "--traces", type=Path, help="folder with the Azure traces (github.com/Azure/AzurePublicDataset)"
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs per case, paired between cases (default 3)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no simulation after so long")
    parser.add_argument("--partial", action="store_true", help="report on what is there")
    parser.add_argument("--only", nargs="+", default=(), help="parts of a study that has parts")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: proves that the command works, no more")
    given = parser.parse_args(arguments)
    seeds = range(1, 1 + (min(given.seeds, QUICK_SEEDS) if given.quick else given.seeds))
    return Options(given.out, given.quick, given.traces, seeds, given.seconds, given.partial, tuple(given.only))
