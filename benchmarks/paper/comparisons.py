"""What is compared in the long runs of stable.py: for each comparison of the figures the same lines under stable loads.

Latency under surges and beyond capacity has no steady state; it is in the figures themselves and in benchmarks/beyond.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice

from .points import Point

SATURATED_SEED, SATURATED_JOBS = 99, 600

COLUMNS = {
    "mean, s/token": ("mean_normalised_latency", 1.0, 4),
    "P95": ("p95_normalised_latency", 1.0, 4),
    "P99": ("p99_normalised_latency", 1.0, 4),
    "completion, s": ("mean_e2el_ms", 1e-3, 1),
    "first token, s": ("mean_ttft_ms", 1e-3, 2),
    "longest wait, s": ("longest_wait_ms", 1e-3, 1),
    "queueing": ("queueing_share", 1.0, 2),
    "peak KV, K tokens": ("peak_kv_tokens", 1e-3, 1),
    "within 5x": ("attainment/5", 1.0, 3),
    "Jain, output": ("quartile_fairness/output", 1.0, 2),
}
"""Of a table: what a point calls it, a factor, digits."""

KV_COLUMNS = {
    **{name: COLUMNS[name] for name in ("mean, s/token", "P95", "P99", "completion, s", "longest wait, s")},
    "blocked on swaps": ("swap_blocked_share", 1.0, 4),
    "GB in": ("swapped_in_bytes", 1e-9, 0),
    "computed again": ("recomputed_share", 1.0, 2),
}
CHUNK_COLUMNS = {
    **{name: COLUMNS[name] for name in ("mean, s/token", "P95", "P99", "completion, s", "first token, s")},
    "P99 between tokens, ms": ("p99_itl_ms", 1.0, 0),
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """`lines`: by name, points but for rate and seed; the first is what the others are compared with."""

    title: str
    lines: Mapping[str, Point]
    columns: Mapping[str, tuple[str, float, int]]

    def shortened(self) -> "Comparison":
        """The first two lines."""
        return replace(self, lines=dict(islice(self.lines.items(), 2)))

    @property
    def saturated(self) -> Point:
        """What tells the capacity: the system under first come, first served, everybody there from the start."""
        first = next(iter(self.lines.values()))
        return replace(
            first, order="fcfs", kv="proactive", rate=0, seed=SATURATED_SEED, jobs=SATURATED_JOBS, window=False
        )


def of_orders(title: str, base: Point, *orders: str) -> Comparison:
    return Comparison(title, {order: replace(base, order=order) for order in orders}, COLUMNS)


def of_kv(title: str, base: Point, *policies: str) -> Comparison:
    return Comparison(title, {kv: replace(base, kv=kv) for kv in policies}, KV_COLUMNS)


def long_run(system: str, load: str, jobs: int, order: str = "", batch: int = 16) -> Point:
    return Point(system, order, load, 0, 0, jobs, batch, window=True)


SHAREGPT = long_run("opt-13b", "sharegpt", 1000)
USUAL = ("fcfs", "paper", "alpha-10s", "predicted")
BY_RATIO = ("fcfs", "fixed-priority", "naive-mlfq", "naive-mlfq-abort", "paper", "alpha-10s", "predicted", "srpt")
JOBS_BY_RATIO = {0.25: 400, 1: 600, 4: 1000, 16: 1500, 64: 2000, 256: 2000}
CHUNK = 256

GROUPS: dict[str, tuple[Comparison, ...]] = {
    "Models and data (figures 1, 8, 11, 12, 13; fairness)": (
        of_orders("OPT-13B, ShareGPT", SHAREGPT, "fcfs", "round-robin", "paper", "alpha-10s", "predicted", "srpt"),
        of_orders("OPT-66B, ShareGPT", long_run("opt-66b", "sharegpt", 1000), *USUAL),
        of_orders("OPT-175B, ShareGPT", long_run("opt-175b", "sharegpt", 1000), *USUAL),
        of_orders("OPT-13B, Alpaca", long_run("opt-13b", "alpaca", 2000), *USUAL),
        of_orders("OPT-66B, Alpaca", long_run("opt-66b", "alpaca", 2000), *USUAL),
        of_orders("OPT-175B, Alpaca", long_run("opt-175b", "alpaca", 2000), *USUAL),
        of_orders("OPT-13B, equal lengths", long_run("opt-13b", "fixed", 1000), *USUAL),
    ),
    "The artifact's: grouped-query attention, large batches": (
        of_orders("Llama-3-8B, ShareGPT", long_run("llama-3-8b", "sharegpt", 1000), *USUAL),
        of_orders("Llama-3-8B, Alpaca", long_run("llama-3-8b", "alpaca", 2000), *USUAL),
        of_orders("OPT-13B, batches of 64", replace(SHAREGPT, batch=64), *USUAL),
        of_orders("OPT-13B, batches of 128", replace(SHAREGPT, batch=128), *USUAL),
    ),
    "Chunked prefill": (
        Comparison(
            "prompts in chunks",
            {
                "FCFS, whole prompts": replace(SHAREGPT, order="fcfs"),
                "FCFS, chunks": replace(SHAREGPT, order="fcfs", chunk=CHUNK),
                "skip-join 10 s, whole": replace(SHAREGPT, order="alpha-10s"),
                "skip-join 10 s, chunks": replace(SHAREGPT, order="alpha-10s", chunk=CHUNK),
            },
            CHUNK_COLUMNS,
        ),
    ),
    "KV policies (figure 15)": (
        of_kv(
            "KV, alpha 10 s",
            replace(SHAREGPT, order="alpha-10s"),
            "proactive",
            "reactive",
            "blocking",
            "recompute",
            "defer",
        ),
        of_kv("KV, alpha 0.3 s", replace(SHAREGPT, order="paper"), "proactive", "reactive", "blocking", "recompute"),
    ),
    "Policies by ratio of input to output (figure 14)": tuple(
        of_orders(f"in/out {ratio:g}", long_run("opt-13b-ample", f"ratio:{ratio:g}", jobs), *BY_RATIO)
        for ratio, jobs in JOBS_BY_RATIO.items()
    ),
}
