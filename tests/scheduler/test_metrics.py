"""What Prometheus sees: sums that agree, and gauges that are zero when nothing runs."""

import asyncio
import re
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fastserve_scheduler import app
from fastserve_scheduler.core.commands import PlanItem
from fastserve_scheduler.core.snapshot import Snapshot
from fastserve_scheduler.messages import Refusal
from fastserve_scheduler.metrics import Metrics, serve_metrics

from .rig import Cluster, until, until_async


def _fetch(port: int) -> dict[tuple[str, str], float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        text = response.read().decode()
    return {
        (sample.name, ",".join(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_sums_agree_and_gauges_return_to_zero_after_a_mass_abort(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports: list[int] = []

    def serve_on_any_port(
        replicas: Sequence[tuple[Metrics, Callable[[], Snapshot | None]]], host: str, port: int, *, vllm_model: str
    ) -> tuple[int, Callable[[], None]]:
        found, stop = serve_metrics(replicas, host, 0, vllm_model=vllm_model)
        ports.append(found)
        return found, stop

    monkeypatch.setattr(app, "serve_metrics", serve_on_any_port)
    flags = ["--metrics-port", "1", "--reattach-grace", "0", "--vllm-metric-names", "--served-model-name", "m"]
    async with Cluster(tmp_path, 2, flags=flags) as cluster:
        gateway = await cluster.gateway()
        for n in range(10):
            await gateway.ask([n], 5)
        await gateway.ask([1] * 500, 100)  # too long
        for _ in range(2):
            await gateway.ask([], 5)
        await gateway.submit([1], 5, request_id="twice")
        assert (await gateway.ask([2], 5, request_id="twice")).refusal == "DUPLICATE_ID"
        for n in range(100):
            await gateway.submit([n], 400)
        await until(lambda: sum(bool(answer.ids) for answer in gateway.answers.values()) > 30)

        async def all_are_there() -> bool:
            state = await cluster.state()
            return state.running + state.waiting == 100

        await until_async(all_are_there)
        busy = await asyncio.to_thread(_fetch, ports[0])
        await gateway.close()
        await until_async(cluster.ledger_is_clean)
        idle = await asyncio.to_thread(_fetch, ports[0])
    for name in ("num_requests_running", "kv_blocks_used", "kv_cache_usage_perc", "batches_in_flight"):
        assert busy[f"fastserve:{name}", ""] > 0
        assert idle[f"fastserve:{name}", ""] == 0
    levels = [
        value for (name, _), value in idle.items() if re.match(r"fastserve:queue_(waiting|running|longest_wait)", name)
    ]
    assert levels
    assert not any(levels)
    assert sum(value > 0 for (name, _), value in busy.items() if name == "fastserve:queue_longest_wait_seconds") > 0
    outcomes = {label: value for (name, label), value in idle.items() if name == "fastserve:request_success_total"}
    assert outcomes["cancelled"] > 0
    assert outcomes["length"] + outcomes["cancelled"] == 111
    assert idle["fastserve:requests_accepted_total", ""] == idle["fastserve:requests_finished_total", ""] == 111
    assert idle["fastserve:iteration_round_trip_seconds_count", ""] == idle["fastserve:iteration_seconds_count", ""]
    assert idle["fastserve:iteration_round_trip_seconds_sum", ""] > idle["fastserve:iteration_seconds_sum", ""]
    assert idle["fastserve:iteration_seconds_count", ""] == idle["fastserve:iteration_batch_size_count", ""] > 0
    assert busy["vllm:kv_cache_usage_perc", "0,m"] == busy["fastserve:kv_cache_usage_perc", ""]
    _check_preemptions(idle)
    _check_refusals(idle)
    _check_times(idle, outcomes)


def _check_refusals(idle: dict[tuple[str, str], float]) -> None:
    refused = {label: value for (name, label), value in idle.items() if name == "fastserve:admission_rejections_total"}
    assert {label: v for label, v in refused.items() if v} == {"too-long": 1, "invalid": 2, "duplicate-id": 1}
    assert len(refused) == len(Refusal), "each begins at zero: a rate wants a beginning"


def _check_preemptions(idle: dict[tuple[str, str], float]) -> None:
    preempted = {label: value for (name, label), value in idle.items() if name == "fastserve:num_preemptions_total"}
    assert {label: v for (name, label), v in idle.items() if name == "vllm:num_preemptions_total"} == {
        f"{cause},0,m": value for cause, value in preempted.items()
    }
    assert len(preempted) == 3
    assert ("vllm:num_requests_running", "0,m") not in idle, "gateways say that"


def _check_times(idle: dict[tuple[str, str], float], outcomes: dict[str, float]) -> None:
    """Where the time of 111 requests went; some were left before they ran."""

    def of(name: str, what: str) -> float:
        ours = idle[f"fastserve:request_{name}_{what}", ""]
        assert idle[f"vllm:request_{name}_{what}", "0,m"] == ours
        return ours

    assert of("queue_time_seconds", "count") == sum(outcomes.values())
    assert of("decode_time_seconds", "count") >= outcomes["length"]
    assert of("prefill_time_seconds", "count") == of("inference_time_seconds", "count")
    assert of("prefill_kv_computed_tokens", "count") == of("inference_time_seconds", "count")
    parts = of("prefill_time_seconds", "sum") + of("decode_time_seconds", "sum")
    assert of("inference_time_seconds", "sum") == pytest.approx(parts) != 0
    for name in ("queue_time_seconds", "prefill_time_seconds", "decode_time_seconds", "inference_time_seconds"):
        assert of(name, "count") == idle[f"fastserve:request_{name}_bucket", "+Inf"] > 0
    finished = idle["fastserve:kv_device_residency_seconds_count", "finished"]
    assert 0 < finished <= of("inference_time_seconds", "count")


async def test_a_replica_is_an_engine_of_vllm() -> None:
    replicas = [Metrics(), Metrics()]
    replicas[1].iteration(10, 10, [PlanItem(1, 0, 7, True, 0, ())])
    port, stop = serve_metrics([(metrics, lambda: None) for metrics in replicas], "127.0.0.1", 0, vllm_model="m")
    try:
        found = await asyncio.to_thread(_fetch, port)
    finally:
        await asyncio.to_thread(stop)
    tokens = {label: value for (name, label), value in found.items() if name == "vllm:iteration_tokens_total_sum"}
    assert tokens == {"0,m": 0, "1,m": 7}


async def test_every_replica_is_served() -> None:
    replicas = [Metrics(), Metrics()]
    for count, metrics in enumerate(replicas, start=1):
        for _ in range(count):
            metrics.swap_failed(0)
    port, stop = serve_metrics([(metrics, lambda: None) for metrics in replicas], "127.0.0.1", 0)
    try:
        found = await asyncio.to_thread(_fetch, port)
    finally:
        await asyncio.to_thread(stop)
    failed = {label: value for (name, label), value in found.items() if name == "fastserve:swaps_failed_total"}
    assert failed == {"0,0": 1, "1,0": 2}, "replica, stage"
