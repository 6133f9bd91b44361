"""Results as a table: what was simulated, then one column per policy."""

from collections.abc import Sequence

from rich.table import Table

from fastserve_scheduler.sim.fleet import Plant
from fastserve_scheduler.sim.report import Result
from fastserve_scheduler.simulate.settings import SimulateSettings
from fastserve_scheduler.simulate.workload import Load

_ROWS: tuple[tuple[str, str], ...] = (
    ("Completed requests", "completed"),
    ("Refused requests", "failed"),
    ("Duration (s)", "duration"),
    ("Request throughput (req/s)", "request_throughput"),
    ("Request goodput (req/s)", "request_goodput"),
    ("Output throughput (tok/s)", "output_throughput"),
    ("Normalised latency (s/token)", "mean_normalised_latency"),
    ("  median", "median_normalised_latency"),
    ("  P95", "p95_normalised_latency"),
    ("  P99", "p99_normalised_latency"),
    ("Time to first token (ms)", "mean_ttft_ms"),
    ("  P95", "p95_ttft_ms"),
    ("Time per output token (ms)", "mean_tpot_ms"),
    ("  P95", "p95_tpot_ms"),
    ("End-to-end latency (ms)", "mean_e2el_ms"),
    ("  P95", "p95_e2el_ms"),
    ("  P99", "p99_e2el_ms"),
    ("Longest wait for a token (ms)", "longest_wait_ms"),
    ("Share of latency: queueing", "queueing_share"),
    ("  executing", "executing_share"),
    ("  blocked on swaps", "swap_blocked_share"),
    ("Fairness over length classes (Jain)", "length_class_fairness"),
    ("Promotions", "promotions"),
    ("Swapped out (bytes)", "swapped_out_bytes"),
    ("Recomputed share of tokens", "recomputed_share"),
    ("Peak KV (tokens)", "peak_kv_tokens"),
    ("Iterations", "iterations"),
)


def report(settings: SimulateSettings, plant: Plant, load: Load, results: Sequence[Result]) -> Table:
    table = Table(title=_title(settings, plant, load))
    table.add_column("")
    for policy in settings.policies:
        table.add_column(policy, justify="right")
    for title, key in _ROWS:
        if any(result[key] is not None for result in results):
            table.add_row(title, *(_number(result[key]) for result in results))
    table.add_row("Preemptions", *(_number(_total(result["preemptions"])) for result in results))
    return table


def _title(settings: SimulateSettings, plant: Plant, load: Load) -> str:
    rate = "the trace's own rate" if load.rate is None else f"{load.rate:.3g} req/s"
    share = "" if load.capacity is None else f" (capacity {load.capacity:.3g})"
    blocks = plant.num_blocks * plant.config.block_size
    return f"{settings.replicas} x {settings.pp} stages, {blocks:,} tokens of KV, {rate}{share}, seed {settings.seed}"


def _total(counts: object) -> int:
    assert isinstance(counts, dict)
    return sum(counts.values())


def _number(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.4f}" if abs(value) < 10 else f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
