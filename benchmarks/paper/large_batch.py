"""The artifact's comparison with batches of 64 and 128 jobs: OPT-13B on ShareGPT, one A100 40 GB.

Memory for 14,900 tokens holds some 40 running jobs: with so large a batch memory bounds it, not its slots.
"""

import sys

from .figure import main
from .points import Point
from .sweep import Line, Panel, Sweep

RATES = (2.5, 3.5, 5, 7)


def lines(batch: int) -> tuple[Line, ...]:
    names = {"fcfs": ("FCFS", "FastServe-FCFS"), "paper": ("skip-join, 0.3 s", "FastServe")}
    return tuple(
        Line(name, Point("opt-13b", order, "sharegpt", 0, 0, batch=batch), RATES, theirs)
        for order, (name, theirs) in names.items()
    )


SWEEP = Sweep(
    "large_batch",
    tuple(Panel(f"batches of {batch}", lines(batch), ("nsdi_fig14_large_batch", f"bs{batch}")) for batch in (64, 128)),
)

FIGURE = SWEEP.figure()

if __name__ == "__main__":
    sys.exit(main(FIGURE))
