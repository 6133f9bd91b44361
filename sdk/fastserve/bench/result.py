"""A run as a result file, under the names that serving benchmarks share.

The keys up to `e2el` are those of `vllm bench serve`, with the same meaning; what is ours beside them is listed in
`extras`. Latencies are in ms except `normalised_latency`, which the literature gives in s/token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from fastserve.bench.metrics import METRICS, Metric, Run
from fastserve.bench.runner import Measured
from fastserve_common.load import stats

Result = dict[str, object]

#: A client that sends later than this (99th percentile) disturbs the arrivals it claims.
MAX_CLIENT_LAG_MS = 50.0
#: A client that is busy for more than this share of one core may be what limits the measured rate.
MAX_CLIENT_CPU_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Setup:
    """What was asked for; goes into the result as it is."""

    backend: str
    endpoint_type: str
    model_id: str
    tokenizer_id: str
    num_prompts: int
    request_rate: float | str
    arrivals: str
    burstiness: float | str
    max_concurrency: int | None = None
    label: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    ramp_up: Mapping[str, float | str] = field(default_factory=dict)
    slo_ms: Mapping[str, float] = field(default_factory=dict)
    metrics: Sequence[Metric] = METRICS
    percentiles: Sequence[float] = (95.0, 99.0)


def to_result(setup: Setup, measured: Measured, date: datetime, *, detailed: bool = False) -> Result:
    """Everything, JSON-ready. `detailed`: with one entry per request, failed ones included."""
    result: Result = {
        "date": date.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": setup.endpoint_type,
        "backend": setup.backend,
        "label": setup.label,
        "model_id": setup.model_id,
        "tokenizer_id": setup.tokenizer_id,
        "num_prompts": setup.num_prompts,
        **setup.metadata,
        "request_rate": setup.request_rate,
        "burstiness": setup.burstiness,
        "max_concurrency": setup.max_concurrency,
        **setup.ramp_up,
        **_totals(setup, measured.run),
    }
    for metric in setup.metrics:
        result.update(stats.summary(f"{metric}_ms", measured.run.samples_s(metric), setup.percentiles, scale=1000))
    if setup.max_concurrency is not None:
        result.update(_queue_times(measured.run, setup.percentiles))
    result.update(extras(setup, measured))
    if detailed:
        result.update(_details(measured.run))
    return result


def _totals(setup: Setup, run: Run) -> Result:
    return {
        "duration": run.duration_s,
        "completed": len(run.completed),
        "failed": run.failed,
        "total_input_tokens": run.input_tokens,
        "total_output_tokens": run.output_tokens,
        "request_throughput": run.per_second(len(run.completed)),
        "request_goodput": run.per_second(run.num_good(setup.slo_ms)) if setup.slo_ms else None,
        "output_throughput": run.per_second(run.output_tokens),
        "total_token_throughput": run.per_second(run.input_tokens + run.output_tokens),
        "max_output_tokens_per_s": run.peak_output_tokens_per_s(),
        "max_concurrent_requests": run.peak_concurrency(),
        "rtfx": 0.0,  # of audio models; always there in this format
    }


def _queue_times(run: Run, percentiles: Sequence[float]) -> Result:
    queue_s = sorted(o.queue_s for o in run.completed)
    with_queue_s = sorted(o.queue_s + o.latency_s for o in run.completed)
    return {
        **stats.summary("client_queue_time_ms", queue_s, percentiles, scale=1000),
        **stats.summary("e2el_including_client_queue_ms", with_queue_s, percentiles, scale=1000),
    }


def extras(setup: Setup, measured: Measured) -> Result:
    """What this benchmark adds to the shared keys."""
    run, gaps_s = measured.run, measured.run.longest_gaps_s()
    lag_s = sorted(o.lag_s for o in run.outcomes)
    cpu_share = measured.cpu_s / run.duration_s if run.duration_s > 0 else 0.0
    lag_p99_ms = stats.percentile(lag_s, 99) * 1000
    late = setup.arrivals != "at-once" and lag_p99_ms > MAX_CLIENT_LAG_MS
    return {
        "arrivals": setup.arrivals,
        "goodput_slo_ms": dict(setup.slo_ms),
        **stats.summary("normalised_latency", run.normalised_s(), (95, 99), scale=1),
        "longest_gap_ms": (gaps_s[-1] if gaps_s else 0.0) * 1000,
        "p95_longest_gap_ms": stats.percentile(gaps_s, 95) * 1000,
        "by_output_length": {
            name: _class_row(Run(group, run.duration_s)) for name, group in run.by_length_class().items()
        },
        "length_class_fairness": run.fairness(),
        "mean_client_lag_ms": stats.mean(lag_s) * 1000,
        "p99_client_lag_ms": lag_p99_ms,
        "max_client_lag_ms": (lag_s[-1] if lag_s else 0.0) * 1000,
        "client_cpu_s": measured.cpu_s,
        "client_cpu_share": cpu_share,
        "client_cpu_us_per_token": measured.cpu_s * 1e6 / max(run.output_tokens, 1),
        "client_saturated": late or cpu_share > MAX_CLIENT_CPU_SHARE,
    }


def _class_row(run: Run) -> Result:
    gaps_s = run.longest_gaps_s()
    return {
        "completed": len(run.completed),
        **stats.summary("ttft_ms", run.samples_s("ttft"), (95, 99), scale=1000),
        **stats.summary("e2el_ms", run.samples_s("e2el"), (95, 99), scale=1000),
        **stats.summary("normalised_latency", run.normalised_s(), (95, 99), scale=1),
        "longest_gap_ms": (gaps_s[-1] if gaps_s else 0.0) * 1000,
    }


def _details(run: Run) -> Result:
    outcomes = run.outcomes
    return {
        "input_lens": [o.input_tokens for o in outcomes],
        "output_lens": [o.output_tokens for o in outcomes],
        "ttfts": [o.ttft_s for o in outcomes],
        "itls": [o.gaps_s for o in outcomes],
        "latencies": [o.latency_s for o in outcomes],
        "queue_times": [o.queue_s for o in outcomes],
        "start_times": [o.sent_s for o in outcomes],
        "client_lags": [o.lag_s for o in outcomes],
        "generated_texts": [o.text for o in outcomes],
        "errors": [o.error for o in outcomes],
    }
