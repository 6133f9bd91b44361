"""The artifact's comparison with chunked prefill: OPT-13B on ShareGPT, whole prompts against chunks of 256 tokens.

The artifact has it for vLLM alone; here both orders have both. The curves named vLLM are another engine's.
"""

import sys

from .figure import main
from .points import Point
from .sweep import Line, Panel, Sweep

RATES = (2, 2.5, 3.5)
CHUNK = 256


def line(name: str, order: str, chunk: int, theirs: str = "") -> Line:
    return Line(name, Point("opt-13b", order, "sharegpt", 0, 0, chunk=chunk), RATES, theirs)


SWEEP = Sweep(
    "chunked_prefill",
    (
        Panel(
            "OPT-13B, ShareGPT",
            (
                line("FCFS, whole prompts", "fcfs", 0, "vLLM"),
                line("FCFS, chunks", "fcfs", CHUNK, "vLLM+chunked"),
                line("skip-join 10 s, whole", "alpha-10s", 0, "FastServe"),
                line("skip-join 10 s, chunks", "alpha-10s", CHUNK),
            ),
            ("nsdi_fig18_chunked_prefill", "sharegpt"),
        ),
    ),
    extra={"P99 between tokens, ms": ("p99_itl_ms", 1, 0), "first token, s": ("mean_ttft_ms", 1e-3, 2)},
)

FIGURE = SWEEP.figure()

if __name__ == "__main__":
    sys.exit(main(FIGURE))
