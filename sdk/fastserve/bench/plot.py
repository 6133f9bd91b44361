"""One picture of a run: when each request waited, how latency is distributed, and what each length paid."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fastserve.bench.metrics import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class PlotError(Exception):
    """A sentence for the person who asked for the picture."""


def save_plot(run: Run, path: Path, title: str) -> None:
    """Raises PlotError when matplotlib is not installed or the file cannot be written."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotError("--plot needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(12, 7), layout="constrained")
    figure.suptitle(title)
    (timeline, ttft), (normalised, lengths) = figure.subplots(2, 2)
    _timeline(timeline, run)
    _cdf(ttft, "time to first token (s)", run.samples_s("ttft"))
    _cdf(normalised, "normalised latency (s/token)", run.normalised_s())
    _by_length(lengths, run)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise PlotError(f"--plot: cannot write {path}: {error}") from error


def _timeline(axes: Axes, run: Run) -> None:
    """A bar per request: waiting for the first token, then receiving."""
    rows = [(number, o) for number, o in enumerate(run.outcomes) if o.ok]
    numbers = [number for number, _ in rows]
    sent_s = [o.sent_s for _, o in rows]
    ttft_s = [o.ttft_s for _, o in rows]
    axes.barh(numbers, ttft_s, left=sent_s, height=1.0, color="tab:orange", label="to first token")
    axes.barh(
        numbers,
        [o.latency_s - o.ttft_s for _, o in rows],
        left=[start + wait for start, wait in zip(sent_s, ttft_s, strict=True)],
        height=1.0,
        color="tab:blue",
        label="to last token",
    )
    axes.set(xlabel="time (s)", ylabel="request")
    axes.legend(loc="lower right")


def _cdf(axes: Axes, label: str, ordered: Sequence[float]) -> None:
    axes.step(ordered, [(rank + 1) / len(ordered) for rank in range(len(ordered))], where="post")
    axes.set(xlabel=label, ylabel="share of requests", ylim=(0, 1.01))
    if ordered and ordered[0] > 0:
        axes.set_xscale("log")
    axes.grid(visible=True, alpha=0.3)


def _by_length(axes: Axes, run: Run) -> None:
    axes.scatter([o.output_tokens for o in run.completed], [o.normalised_s for o in run.completed], s=6, alpha=0.5)
    axes.set(xlabel="output (tokens)", ylabel="normalised latency (s/token)")
    if run.completed:
        axes.set(xscale="log", yscale="log")
    axes.grid(visible=True, alpha=0.3)
