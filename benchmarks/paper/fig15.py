"""Figure 15: what happens to KV when it does not fit, and how much of the latency is waiting for copies.

`blocking` is the reactive rival as the paper describes it: an iteration waits for its own copies. `reactive` moves
late as well, but runs what is there. Recomputing with alpha 0.3 s is left out: jobs throw each other out without end
(docs/adr/0014 has it: 129 tokens computed again for each one wanted). The second protocol is in stable.py.
"""

import sys

from .figure import main
from .points import Point
from .sweep import Line, Panel, Sweep

RATES = (1.5, 2.5, 3.5)


def lines(order: str, *kv_policies: str) -> tuple[Line, ...]:
    names = {"proactive": "Proactive", "blocking": "Reactive", "recompute": "Recompute"}
    return tuple(
        Line(kv, Point("opt-13b", order, "sharegpt", 0, 0, kv=kv), RATES, names.get(kv, "")) for kv in kv_policies
    )


SWEEP = Sweep(
    "fig15",
    (
        Panel(
            "alpha 10 s", lines("alpha-10s", "proactive", "reactive", "blocking", "recompute"), ("nsdi_fig17_swapping",)
        ),
        Panel("alpha 0.3 s", lines("paper", "proactive", "reactive", "blocking"), ("nsdi_fig17_swapping",)),
    ),
    extra={
        "queueing %": ("queueing_share", 100, 1),
        "executing %": ("executing_share", 100, 1),
        "blocked %": ("swap_blocked_share", 100, 2),
        "GB in": ("swapped_in_bytes", 1e-9, 0),
        "computed again": ("recomputed_share", 1, 2),
    },
)

FIGURE = SWEEP.figure()

if __name__ == "__main__":
    sys.exit(main(FIGURE))
