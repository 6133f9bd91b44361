"""A result as the familiar table on a terminal."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from fastserve.bench.metrics import Metric
from fastserve.bench.result import Result, Setup
from fastserve_common.load.stats import percentile_name

TITLES: dict[Metric, str] = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


def print_report(console: Console, setup: Setup, result: Result) -> None:
    """The familiar table, then what is ours, then what should worry the reader."""
    table = Table(title="Serving Benchmark Result", show_header=False, min_width=60)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for title, key in _HEAD:
        if result.get(key) is not None:
            table.add_row(title, _number(result[key]))
    if result["completed"]:
        _add_latencies(table, setup, result)
    console.print(table)
    if result["completed"]:
        _print_classes(console, result)
    for warning in warnings(result):
        console.print(f"[yellow]Warning:[/yellow] {warning}")


_HEAD = (
    ("Successful requests", "completed"),
    ("Failed requests", "failed"),
    ("Maximum request concurrency", "max_concurrency"),
    ("Request rate configured (req/s)", "request_rate"),
    ("Benchmark duration (s)", "duration"),
    ("Total input tokens", "total_input_tokens"),
    ("Total generated tokens", "total_output_tokens"),
    ("Request throughput (req/s)", "request_throughput"),
    ("Request goodput (req/s)", "request_goodput"),
    ("Output token throughput (tok/s)", "output_throughput"),
    ("Peak output token throughput (tok/s)", "max_output_tokens_per_s"),
    ("Peak concurrent requests", "max_concurrent_requests"),
    ("Total token throughput (tok/s)", "total_token_throughput"),
)

_TAIL = (
    ("Longest gap (ms)", "longest_gap_ms"),
    ("P95 of answers' longest gaps (ms)", "p95_longest_gap_ms"),
    ("Fairness over length classes (Jain)", "length_class_fairness"),
    ("P99 client lag (ms)", "p99_client_lag_ms"),
    ("Client CPU (us/token)", "client_cpu_us_per_token"),
)


_CLASS_HEADINGS = ("output", "requests", "s/token", "P95", "TTFT P95 ms", "E2EL P99 ms", "longest gap ms")


def _add_latencies(table: Table, setup: Setup, result: Result) -> None:
    percentiles = [percentile_name(p) for p in setup.percentiles]
    for metric in setup.metrics:
        _add_block(table, f"{TITLES[metric]} (ms)", f"{metric}_ms", percentiles, result)
    _add_block(table, "Normalised latency (s/token)", "normalised_latency", ["p95", "p99"], result)
    table.add_section()
    for title, key in _TAIL:
        table.add_row(title, _number(result[key]))


def _add_block(table: Table, title: str, name: str, percentiles: Sequence[str], result: Result) -> None:
    table.add_section()
    table.add_row(f"[cyan]{title}[/cyan]", "")
    for word in ("mean", "median", *percentiles):
        table.add_row(word.capitalize(), _number(result[f"{word}_{name}"], digits=4 if "normalised" in name else 2))


def _print_classes(console: Console, result: Result) -> None:
    classes = result["by_output_length"]
    assert isinstance(classes, dict)
    table = Table(title="Normalised latency and tails by output length (tokens)")
    for heading in _CLASS_HEADINGS:
        table.add_column(heading, justify="right")
    keys = ("mean_normalised_latency", "p95_normalised_latency", "p95_ttft_ms", "p99_e2el_ms", "longest_gap_ms")
    for name, row in classes.items():
        digits = (4, 4, 2, 2, 2)
        cells = [_number(row[key], digits=d) for key, d in zip(keys, digits, strict=True)]
        table.add_row(name, str(row["completed"]), *cells)
    console.print(table)


def warnings(result: Mapping[str, object]) -> list[str]:
    """What makes the numbers doubtful."""
    found = []
    if result["client_saturated"]:
        found.append(
            f"the load generator itself was too slow (p99 send lag {_number(result['p99_client_lag_ms'])} ms, "
            f"{_number(result['client_cpu_share'])} of a core): latencies and rates include its own delay"
        )
    if not result["completed"]:
        found.append("no request completed")
    elif result["failed"]:
        found.append(f"{result['failed']} requests failed; every figure is of the completed ones only")
    return found


def _number(value: object, digits: int = 2) -> str:
    return f"{value:,.{digits}f}" if isinstance(value, float) else str(value)
