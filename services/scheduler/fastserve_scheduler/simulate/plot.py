"""One picture of one or more policies under the same load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fastserve_scheduler.sim.fleet import Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class PlotError(Exception):
    """A sentence for the person who asked for the picture."""


def save_plot(runs: Sequence[tuple[str, Outcome]], path: Path) -> None:
    """Distributions of normalised latency, first token and whole answer, and latency by output length.

    Raises PlotError when matplotlib is not installed or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotError("--plot needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(12, 7), layout="constrained")
    (normalised, first), (whole, lengths) = figure.subplots(2, 2)
    for name, outcome in runs:
        finished = outcome.recorder.finished
        _cdf(normalised, name, "normalised latency (s/token)", finished.per_token_s())
        _cdf(first, name, "time to first token (s)", finished.first_s())
        _cdf(whole, name, "end-to-end latency (s)", finished.latency_s())
        lengths.scatter(finished.output, finished.per_token_s(), s=5, alpha=0.4, label=name)
    lengths.set(xlabel="output (tokens)", ylabel="normalised latency (s/token)", xscale="log", yscale="log")
    for axes in (normalised, first, whole, lengths):
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise PlotError(f"--plot: cannot write {path}: {error}") from error


def _cdf(axes: Axes, name: str, label: str, values: Sequence[float]) -> None:
    ordered = sorted(values)
    axes.step(ordered, [(rank + 1) / len(ordered) for rank in range(len(ordered))], where="post", label=name)
    axes.set(xlabel=label, ylabel="share of requests", ylim=(0, 1.01), xscale="log")
