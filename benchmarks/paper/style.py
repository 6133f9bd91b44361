"""One look for all plots: a white ground, so that they read in light and in dark pages, and colours that the
colour-blind can tell apart (Okabe and Ito)."""

from io import BytesIO
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

COLOURS = {
    "fcfs": "#d55e00",
    "batch-fcfs": "#999999",
    "round-robin": "#56b4e9",
    "fixed-priority": "#e69f00",
    "naive-mlfq": "#cc79a7",
    "naive-mlfq-abort": "#8c510a",
    "paper": "#0072b2",
    "alpha-10s": "#009e73",
    "predicted": "#f0a0c0",
    "srpt": "#222222",
}
LABELS = {
    "fcfs": "FCFS",
    "batch-fcfs": "batch FCFS",
    "round-robin": "round robin",
    "fixed-priority": "fixed priority",
    "naive-mlfq": "naive MLFQ",
    "naive-mlfq-abort": "naive MLFQ, aborts",
    "paper": "skip-join, 0.3 s",
    "alpha-10s": "skip-join, 10 s",
    "predicted": "predicted (default)",
    "srpt": "SRPT (oracle)",
}
MARKERS = dict(zip(COLOURS, "osv^DXPdh*", strict=True))
PALETTE = ("#d55e00", "#0072b2", "#009e73", "#e69f00", "#cc79a7", "#56b4e9", "#222222")
SHAPES = "osX^vDP"
"""Of lines that are no policies, in order."""

SLO_COLOUR = "#777777"
DPI = 100
NUM_COLOURS = 64
"""Of a palette: a third of the bytes of true colour."""


def panels(rows: int, columns: int, width: float = 4.0, height: float = 3.1) -> tuple[Figure, list[Axes]]:
    """A figure and its axes, row by row."""
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained", facecolor="white")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for each in axes:
        each.grid(visible=True, alpha=0.25, linewidth=0.6)
        each.spines[["top", "right"]].set_visible(False)
        each.tick_params(labelsize=8)
    return figure, axes


def limit_line(axes: Axes, limit: float, text: str) -> None:
    axes.axhline(limit, color=SLO_COLOUR, linewidth=0.9, linestyle="--")
    axes.annotate(text, (0.01, limit), xycoords=("axes fraction", "data"), fontsize=7, color=SLO_COLOUR, va="bottom")


def legend_below(figure: Figure, axes: Axes, columns: int) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)


def save(figure: Figure, path: Path) -> None:
    for axes in figure.axes:
        axes.title.set_fontsize(9)
        axes.xaxis.label.set_fontsize(8)
        axes.yaxis.label.set_fontsize(8)
    picture = BytesIO()
    figure.savefig(picture, dpi=DPI)
    Image.open(picture).convert("RGB").quantize(NUM_COLOURS).save(path, optimize=True)
