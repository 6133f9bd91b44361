"""What the studies share with the figures of the paper, in the package beside this one.

The type checker knows `benchmarks` as a place where modules lie, because scripts there import each other; the
interpreter knows it as a package.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paper.figure import Table
    from paper.intervals import crossing, interval
    from paper.loads import MAX_TOTAL, lengths
    from paper.series import Series
    from paper.style import PALETTE, legend_below, panels, save
else:
    from ..paper.figure import Table  # noqa: TID252  # there is no other name for it in both worlds
    from ..paper.intervals import crossing, interval  # noqa: TID252
    from ..paper.loads import MAX_TOTAL, lengths  # noqa: TID252
    from ..paper.series import Series  # noqa: TID252
    from ..paper.style import PALETTE, legend_below, panels, save  # noqa: TID252

__all__ = [
    "MAX_TOTAL", "PALETTE", "Series", "Table", "crossing", "interval", "legend_below", "lengths", "panels", "save",
]  # fmt: skip
