"""A simulated run as a result, under the keys of `fastserve bench`, and what only a simulator knows beside them.

Shared keys have the meaning they have there: latencies in ms, except `normalised_latency` in s/token. The client's own
lag and processor time do not exist here, and neither does a date: equal seeds give equal bytes.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fastserve_common.load import stats
from fastserve_common.load.classes import length_class, length_class_name
from fastserve_scheduler.sim.fleet import Outcome
from fastserve_scheduler.sim.recorder import Finished, gaps_by_size

Result = dict[str, object]

NORMALISED = "normalised"
"""Name of the limit on latency per output token."""

SLO_NAMES = ("ttft", "tpot", "e2el", NORMALISED)

QUARTILES = 4


@dataclass(frozen=True, slots=True)
class Setup:
    """What was asked for; `metadata` goes into the result as it is. `slo_ms`: limits that a good request meets.

    `drop_first`, `drop_last`: shares of the requests, in order of arrival, that latencies leave out, so that filling up
    and running empty are not measured. Totals and counters are of the whole run.
    """

    model: str
    request_rate: float | str
    burstiness: float | str = 1.0
    arrivals: str = "gamma"
    label: str | None = None
    metadata: Mapping[str, object] = field(default_factory=dict)
    slo_ms: Mapping[str, float] = field(default_factory=dict)
    percentiles: Sequence[float] = (95.0, 99.0)
    drop_first: float = 0.0
    drop_last: float = 0.0
    detailed: bool = False


def to_result(setup: Setup, outcome: Outcome) -> Result:
    """JSON-ready; the same bytes for the same run."""
    measured = in_window(outcome, setup.drop_first, setup.drop_last)
    result: Result = {
        "endpoint_type": "simulated",
        "backend": "simulator",
        "label": setup.label,
        "model_id": setup.model,
        "tokenizer_id": None,
        "num_prompts": outcome.offered,
        **setup.metadata,
        "request_rate": setup.request_rate,
        "burstiness": setup.burstiness,
        "max_concurrency": None,
        **_totals(setup, outcome, measured),
        **_latencies(measured, setup.percentiles),
        **_gaps(outcome, setup.percentiles),
        **_extras(setup, measured),
        **_simulated(outcome, measured),
    }
    if setup.detailed:
        result.update(_details(outcome.recorder.finished))
    return result


def in_window(outcome: Outcome, drop_first: float, drop_last: float) -> Finished:
    """Completed requests, less those that arrived first and last; in order of completion."""
    finished = outcome.recorder.finished
    if drop_first == 0 and drop_last == 0:
        return finished
    low, high = outcome.offered * drop_first, outcome.offered * (1 - drop_last)
    return finished.chosen(row for row, number in enumerate(finished.number) if low <= number < high)


def _totals(setup: Setup, outcome: Outcome, measured: Finished) -> Result:
    finished, duration_s = outcome.recorder.finished, outcome.end_ns / 1e9
    num_input, num_output = sum(finished.prompt), sum(finished.output)

    def per_s(count: float) -> float:
        return count / duration_s if duration_s else 0.0

    good = num_good(measured, setup.slo_ms) / max(len(measured), 1)
    return {
        "duration": duration_s,
        "completed": len(finished),
        "failed": outcome.offered - len(finished),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": per_s(len(finished)),
        "request_goodput": per_s(good * len(finished)) if setup.slo_ms else None,
        "output_throughput": per_s(num_output),
        "total_token_throughput": per_s(num_input + num_output),
        "max_output_tokens_per_s": float(outcome.recorder.peak_tokens_per_s),
        "max_concurrent_requests": outcome.recorder.peak_live,
        "rtfx": 0.0,
    }


def num_good(finished: Finished, slo_ms: Mapping[str, float]) -> int:
    """Requests that meet all the limits (keys: SLO_NAMES)."""
    columns = {
        "ttft": finished.first_s,
        "tpot": finished.token_gap_s,
        "e2el": finished.latency_s,
        NORMALISED: finished.per_token_s,
    }
    limits = [(columns[name](), limit / 1000) for name, limit in slo_ms.items()]
    return sum(all(values[row] <= limit for values, limit in limits) for row in range(len(finished)))


def _latencies(finished: Finished, percentiles: Sequence[float]) -> Result:
    gaps = zip(finished.token_gap_s(), finished.output, strict=True)
    return {
        **stats.summary("ttft_ms", sorted(finished.first_s()), percentiles, scale=1000),
        **stats.summary("tpot_ms", sorted(gap for gap, output in gaps if output > 1), percentiles, scale=1000),
        **stats.summary("e2el_ms", sorted(finished.latency_s()), percentiles, scale=1000),
    }


def _gaps(outcome: Outcome, percentiles: Sequence[float]) -> Result:
    """Between tokens, from counts in bins; the mean is exact."""
    sizes = gaps_by_size(outcome.recorder.gap_bins)
    count = sum(number for _, number in sizes)
    mean_s = outcome.recorder.gap_sum_ns / 1e9 / count if count else 0.0
    squares = sum(number * (gap - mean_s) ** 2 for gap, number in sizes)
    values = {
        "mean": mean_s,
        "median": _weighted(sizes, count, 50),
        "std": math.sqrt(squares / count) if count else 0.0,
    }
    values.update({stats.percentile_name(p): _weighted(sizes, count, p) for p in percentiles})
    return {f"{word}_itl_ms": value * 1000 for word, value in values.items()}


def _weighted(sizes: Sequence[tuple[float, int]], count: int, percent: float) -> float:
    rank = percent / 100 * (count - 1)
    passed = 0
    for gap, number in sizes:
        passed += number
        if passed > rank:
            return gap
    return sizes[-1][0] if sizes else 0.0


def _extras(setup: Setup, finished: Finished) -> Result:
    """What `fastserve bench` adds to the keys of other benchmarks."""
    gaps_s = _longest_gaps_s(finished)
    by_class = _by_output_length(finished)
    return {
        "arrivals": setup.arrivals,
        "goodput_slo_ms": dict(setup.slo_ms),
        **stats.summary("normalised_latency", sorted(finished.per_token_s()), (95, 99), scale=1),
        "longest_gap_ms": (gaps_s[-1] if gaps_s else 0.0) * 1000,
        "p95_longest_gap_ms": stats.percentile(gaps_s, 95) * 1000,
        "by_output_length": {name: _class_row(group) for name, group in by_class.items()},
        "length_class_fairness": _fairness(by_class.values()),
    }


def _longest_gaps_s(finished: Finished) -> list[float]:
    """Each answer's longest gap between tokens, sorted; an answer of one token has none."""
    rows = zip(finished.max_gap, finished.output, strict=True)
    return sorted(gap / 1e9 for gap, output in rows if output > 1)


def _by_output_length(finished: Finished) -> dict[str, Finished]:
    rows: dict[int, list[int]] = {}
    for row, output in enumerate(finished.output):
        rows.setdefault(length_class(output), []).append(row)
    return {length_class_name(index): finished.chosen(rows[index]) for index in sorted(rows)}


def _class_row(finished: Finished) -> Result:
    gaps_s = _longest_gaps_s(finished)
    return {
        "completed": len(finished),
        **stats.summary("ttft_ms", sorted(finished.first_s()), (95, 99), scale=1000),
        **stats.summary("e2el_ms", sorted(finished.latency_s()), (95, 99), scale=1000),
        **stats.summary("normalised_latency", sorted(finished.per_token_s()), (95, 99), scale=1),
        "longest_gap_ms": (gaps_s[-1] if gaps_s else 0.0) * 1000,
    }


def _fairness(groups: Iterable[Finished]) -> float:
    """Jain's index over the groups' mean normalised latencies."""
    return stats.jain_fairness([stats.mean(group.per_token_s()) for group in groups])


def _quartiles(finished: Finished, lengths: Sequence[int]) -> list[Finished]:
    """Four groups of nearly one size, short to long; ties are broken by arrival."""
    rows = sorted(range(len(finished)), key=lambda row: (lengths[row], finished.number[row]))
    bounds = [len(rows) * part // QUARTILES for part in range(QUARTILES + 1)]
    groups = [rows[bounds[part] : bounds[part + 1]] for part in range(QUARTILES)]
    return [finished.chosen(group) for group in groups if group]


def _simulated(outcome: Outcome, measured: Finished) -> Result:
    """What only the inside of a server can tell; counters of all replicas together."""
    snapshots = [replica.core.snapshot() for replica in outcome.replicas]
    swaps = [snapshot.swap for snapshot in snapshots]
    config = outcome.plant.config
    tokens = sum(outcome.recorder.finished.prompt) + sum(outcome.recorder.finished.output)
    recomputed = sum(snapshot.recomputed_tokens for snapshot in snapshots)
    busy_ns = [busy for replica in outcome.replicas for busy in replica.busy_ns]
    groups = {"input": _quartiles(measured, measured.prompt), "output": _quartiles(measured, measured.output)}
    return {
        **_shares(outcome),
        "longest_wait_ms": max(measured.longest_waits_s(), default=0.0) * 1000,
        "iterations": sum(snapshot.iterations for snapshot in snapshots),
        "stage_utilisation": [busy / outcome.end_ns if outcome.end_ns else 0.0 for busy in busy_ns],
        "preemptions": {
            "slots": sum(snapshot.preemptions_slots for snapshot in snapshots),
            "tokens": sum(snapshot.preemptions_tokens for snapshot in snapshots),
            "blocks": sum(snapshot.preemptions_blocks for snapshot in snapshots),
        },
        "promotions": sum(snapshot.promotions for snapshot in snapshots),
        "tickets": sum(snapshot.tickets for snapshot in snapshots),
        "swapped_out_bytes": sum(swap.bytes_out for swap in swaps),
        "swapped_in_bytes": sum(swap.bytes_in for swap in swaps),
        "recomputed_tokens": recomputed,
        "recomputed_share": recomputed / tokens if tokens else 0.0,
        "peak_kv_device_tokens": max(replica.peak_device_blocks for replica in outcome.replicas) * config.block_size,
        "peak_kv_tokens": max(replica.peak_blocks for replica in outcome.replicas) * config.block_size,
        "kv_device_tokens": outcome.plant.num_blocks * config.block_size,
        "quartile_fairness": {name: _fairness(found) for name, found in groups.items()},
        "normalised_latency_by_quartile": {
            name: [stats.mean(group.per_token_s()) for group in found] for name, found in groups.items()
        },
        "enst_error_mean_s": _enst_error_s(outcome),
    }


def _shares(outcome: Outcome) -> Result:
    """Where the latency of completed requests went. Blocked: reached in the order while the batch had room, with the KV
    away; executing: in an iteration on its way through the stages; queueing: all the rest."""
    finished = outcome.recorder.finished
    whole_ns = sum(finished.finished) - sum(finished.arrived)
    executing_ns = sum(finished.executing)
    blocked_ns = sum(replica.core.snapshot().swap.blocked_ns for replica in outcome.replicas)
    return {
        "queueing_share": (whole_ns - executing_ns - blocked_ns) / whole_ns if whole_ns else 0.0,
        "executing_share": executing_ns / whole_ns if whole_ns else 0.0,
        "swap_blocked_share": blocked_ns / whole_ns if whole_ns else 0.0,
    }


def _enst_error_s(outcome: Outcome) -> float:
    """Mean of when a swapped request ran again minus when it was expected to."""
    swaps = [replica.core.snapshot().swap for replica in outcome.replicas]
    count = sum(sum(swap.enst_error_counts) for swap in swaps)
    return sum(swap.enst_error_sum_ns for swap in swaps) / 1e9 / count if count else 0.0


def _details(finished: Finished) -> Result:
    """One entry per completed request, in order of arrival."""
    rows = finished.chosen(sorted(range(len(finished)), key=lambda row: finished.number[row]))
    return {
        "input_lens": list(rows.prompt),
        "output_lens": list(rows.output),
        "ttfts": rows.first_s(),
        "latencies": rows.latency_s(),
        "start_times": [at_ns / 1e9 for at_ns in rows.arrived],
        "replicas": list(rows.replica),
    }
