"""Colours and curves of these studies' plots, beside those of the paper's figures."""

from collections.abc import Sequence

from matplotlib.axes import Axes

from .shared import Series, interval

COLOURS = {
    "fcfs": "#d55e00",
    "paper": "#0072b2",
    "alpha 10 s": "#009e73",
    "predicted": "#cc79a7",
    "hints 0.7": "#8c510a",
    "srpt": "#222222",
    "recompute": "#999999",
    "defer": "#e69f00",
}


def curve(
    axes: Axes, xs: Sequence[float], values: Sequence[Sequence[float]], colour: str, label: str, sign: str = "o"
) -> None:
    """Means over seeds with their intervals; points without a value are left out."""
    there = [(x, by_seed) for x, by_seed in zip(xs, values, strict=True) if by_seed]
    drawn = Series([x for x, _ in there], [by_seed for _, by_seed in there])
    axes.errorbar(
        drawn.rates, drawn.means(), yerr=drawn.halves(), color=colour, marker=sign, markersize=4, linewidth=1.4,
        elinewidth=0.8, capsize=2, label=label,
    )  # fmt: skip


def level(axes: Axes, values: Sequence[float], colour: str, label: str) -> None:
    """A line across for what does not depend on the x axis."""
    if values:
        axes.axhline(interval(values)[0], color=colour, linewidth=1.2, linestyle="--", label=label)
