"""The artifact's comparison on a model with grouped-query attention: Llama-3-8B on one A100 40 GB.

The artifact does not name its model. A job's KV is a sixth of OPT-13B's, so memory is never short at 16 jobs a batch.
"""

import sys

from .figure import main
from .points import Point
from .sweep import Line, Panel, Sweep

RATES = {"sharegpt": (2.5, 3.5, 4.5, 7), "alpaca": (12, 17, 22, 30)}


def lines(load: str) -> tuple[Line, ...]:
    names = {"fcfs": ("FCFS", "FastServe-FCFS"), "paper": ("skip-join, 0.3 s", "FastServe")}
    return tuple(
        Line(name, Point("llama-3-8b", order, load, 0, 0), RATES[load], theirs)
        for order, (name, theirs) in names.items()
    )


SWEEP = Sweep("gqa", tuple(Panel(f"Llama-3-8B, {load}", lines(load), ("nsdi_fig15_gqa", load)) for load in RATES))

FIGURE = SWEEP.figure()

if __name__ == "__main__":
    sys.exit(main(FIGURE))
