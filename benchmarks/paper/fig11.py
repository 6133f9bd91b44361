"""Figure 11: mean latency per token over the rate of arrival; three models, two data sets, and the authors' points."""

import sys

from .curves import curve_points, curves_report
from .figure import Figure, main

LOADS = ("sharegpt", "alpaca")

FIGURE = Figure(
    "fig11",
    lambda options, store: curves_report(options, store, "mean_normalised_latency", LOADS, "fig11"),
    (lambda options, store: curve_points(options, LOADS),),
)

if __name__ == "__main__":
    sys.exit(main(FIGURE))
