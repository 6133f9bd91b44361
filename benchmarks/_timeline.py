"""Chrome traces of what stages did: whether one is valid, how much of the copying was hidden, and a picture of it."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

Trace = Mapping[str, Any]

COLOURS = {"compute": "#4c72b0", "wait for copies": "#c44e52", "copy out": "#dd8452", "copy in": "#55a868"}
_US_PER_S = 1e6


@dataclass(frozen=True, slots=True)
class Bar:
    """One event, in seconds since the trace began."""

    stage: int
    what: str
    begin_s: float
    end_s: float


def problems(trace: Trace) -> list[str]:
    """Why a viewer would refuse or misdraw the trace; empty when it is right."""
    events = trace.get("traceEvents")
    if not isinstance(events, list):
        return ["no list of traceEvents"]
    found: list[str] = []
    last_us, row_ends_us = 0.0, dict[tuple[int, int], float]()
    for number, event in enumerate(events):
        missing = {"name", "ph", "pid", "tid"} - event.keys()
        if missing or event["ph"] not in "XM" or (event["ph"] == "X" and not {"ts", "dur"} <= event.keys()):
            found.append(f"event {number} lacks what its kind needs")
            continue
        if event["ph"] == "M":
            continue
        row, end_us = (event["pid"], event["tid"]), event["ts"] + event["dur"]
        if event["dur"] < 0 or event["ts"] < 0:
            found.append(f"event {number} has a negative time")
        if event["ts"] < last_us:
            found.append(f"event {number} begins before the one ahead of it")
        # Half a microsecond: what is left of nanoseconds when sums of floats are compared.
        if event["ts"] < row_ends_us.get(row, 0.0) - 0.5:
            found.append(f"event {number} begins while its row is busy")
        last_us, row_ends_us[row] = event["ts"], end_us
    return found


def bars(trace: Trace) -> list[Bar]:
    return [
        Bar(event["pid"], event["name"], event["ts"] / _US_PER_S, (event["ts"] + event["dur"]) / _US_PER_S)
        for event in trace["traceEvents"]
        if event["ph"] == "X"
    ]


def hidden_share(spans: Iterable[Bar]) -> float:
    """The part of the stages' copy time during which the same stage computed; 1 when nothing was copied."""
    spans = list(spans)
    total_s = hidden_s = 0.0
    for stage in {bar.stage for bar in spans}:
        # Of one stage, one computes at a time: sorted by begin is sorted by end.
        computing = sorted((b.begin_s, b.end_s) for b in spans if b.stage == stage and b.what == "compute")
        ends_s = [end_s for _, end_s in computing]
        for bar in spans:
            if bar.stage == stage and bar.what in ("copy out", "copy in"):
                total_s += bar.end_s - bar.begin_s
                hidden_s += _covered_s(bar, computing, bisect_right(ends_s, bar.begin_s))
    return hidden_s / total_s if total_s else 1.0


def _covered_s(bar: Bar, computing: Sequence[tuple[float, float]], first: int) -> float:
    covered_s = 0.0
    for index in range(first, len(computing)):
        begin_s, end_s = computing[index]
        if begin_s >= bar.end_s:
            break
        covered_s += min(bar.end_s, end_s) - max(bar.begin_s, begin_s)
    return covered_s


def busiest(spans: Sequence[Bar], width_s: float) -> float:
    """Where a window of `width_s` begins in which most is copied."""
    copies = sorted((b for b in spans if b.what in ("copy out", "copy in")), key=lambda bar: bar.begin_s)
    best_s = copied_s = 0.0
    best_begin_s, last = 0.0, 0
    for bar in copies:
        while last < len(copies) and copies[last].begin_s < bar.begin_s + width_s:
            copied_s += copies[last].end_s - copies[last].begin_s
            last += 1
        if copied_s > best_s:
            best_s, best_begin_s = copied_s, bar.begin_s
        copied_s -= bar.end_s - bar.begin_s
    return best_begin_s


def save_plot(spans: Sequence[Bar], path: Path, *, begin_s: float, width_s: float, title: str) -> None:
    """A window: three rows per stage, stage 0 on top."""
    rows = [(stage, row) for stage in sorted({b.stage for b in spans}) for row in ("compute", "copy out", "copy in")]
    shown = [b for b in spans if b.end_s > begin_s and b.begin_s < begin_s + width_s]
    figure = Figure(figsize=(13, 0.55 * len(rows) + 1.6), layout="constrained")
    axes = figure.subplots()
    for bar in shown:
        row = "compute" if bar.what == "wait for copies" else bar.what
        left, length = 1e3 * (bar.begin_s - begin_s), 1e3 * (bar.end_s - bar.begin_s)
        axes.barh(rows.index((bar.stage, row)), length, left=left, height=0.8, color=COLOURS[bar.what], linewidth=0)
    axes.set_yticks(range(len(rows)), [f"stage {stage}: {row}" for stage, row in rows])
    axes.set(xlim=(0, 1e3 * width_s), xlabel="time (ms)", title=title)
    axes.invert_yaxis()
    axes.grid(visible=True, axis="x", alpha=0.3)
    figure.savefig(path, dpi=120)
