"""Figure 12: P95 of the latency per token over the rate of arrival; three models on ShareGPT, with the authors'."""

import sys

from .curves import curve_points, curves_report
from .figure import Figure, main

LOADS = ("sharegpt",)

FIGURE = Figure(
    "fig12",
    lambda options, store: curves_report(options, store, "p95_normalised_latency", LOADS, "fig12"),
    (lambda options, store: curve_points(options, LOADS),),
)

if __name__ == "__main__":
    sys.exit(main(FIGURE))
