"""From a caller's traceparent to what stages computed: one trace, seen by a real collector."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.gateway.models import write_model
from tests.gateway.rig import until_status
from tests.scheduler.swap_rig import SwapCluster, be_quick

from fastserve.v1 import inference_pb2, inference_pb2_grpc
from fastserve_common.channels import open_channel
from fastserve_common.tracing import close_tracing, setup_tracing, tracing
from fastserve_gateway.server import running
from fastserve_gateway.settings import GatewaySettings
from fastserve_worker.fake_stage import FakeOptions

from .collector import Collector, attribute, collecting

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


@pytest.fixture(autouse=True)
def _off_again() -> Iterator[None]:
    yield
    close_tracing()


async def flushed() -> None:
    on = tracing()
    assert on is not None
    await asyncio.to_thread(on.flush)


def settings(cluster: SwapCluster, tmp_path: Path, request_timeout: float = 0.0) -> GatewaySettings:
    model_dir = write_model(tmp_path / "model")
    return GatewaySettings(
        state=cluster.url, model_dir=model_dir, port=0, drain_timeout=0.2, request_timeout=request_timeout
    )


async def test_one_trace_from_the_caller_to_the_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More work than the pool holds: requests are preempted, go to the host and come back."""
    be_quick(monkeypatch)
    flags = ["--kv-policy", "reactive", "--policy", "skip-join-mlfq", "--max-num-seqs", "3", "--alpha-ms", "30"]
    async with collecting() as (collector, endpoint):
        setup_tracing("test", endpoint)
        async with (
            SwapCluster(tmp_path, 2, num_blocks=32, num_slots=256, flags=[*flags, "--quantum-ratio", "2"]) as cluster,
            running(settings(cluster, tmp_path)) as gateway,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.http_port}", timeout=60) as http,
            open_channel(f"127.0.0.1:{gateway.grpc_port}") as channel,
        ):
            await until_status(http, "/health/ready", 200)
            body = {"prompt": [5, 6, 7, 8, 9], "max_tokens": 32, "ignore_eos": True}
            headers = {"traceparent": TRACEPARENT}
            posts = [http.post("/v1/completions", json=body, headers=headers) for _ in range(12)]
            assert {answer.status_code for answer in await asyncio.gather(*posts)} == {200}
            request = inference_pb2.GenerateRequest(text="x")
            request.stopping.max_new_tokens = 3
            request.stopping.ignore_eos = True
            stub = inference_pb2_grpc.InferenceStub(channel)
            await stub.Generate(request, metadata=(("traceparent", TRACEPARENT),))
            await stub.Generate(request)
        await flushed()
        check(collector)


def check(collector: Collector) -> None:
    requests = collector.named("llm_request")
    assert len(requests) == 14
    outside = [span for span in requests if span.trace_id.hex() != TRACE]
    assert len(outside) == 1
    assert outside[0].parent_span_id == b"", "nobody's child begins a trace"
    assert all(span.parent_span_id.hex() == PARENT for span in requests if span not in outside)
    by_id = {span.span_id: span for span in collector.spans}

    schedules = collector.named("schedule")
    assert len(schedules) == 14
    for span in schedules:
        parent = by_id[span.parent_span_id]
        assert parent.name == "llm_request"
        assert parent.trace_id == span.trace_id
        assert attribute(span, "gen_ai.request.id") == attribute(parent, "gen_ai.request.id")
        tokens = attribute(parent, "gen_ai.usage.completion_tokens")
        assert attribute(span, "gen_ai.usage.completion_tokens") == tokens
        assert attribute(parent, "gen_ai.latency.time_to_first_token") > 0
        assert parent.start_time_unix_nano < span.end_time_unix_nano
        children = {child.name for child in collector.spans if child.parent_span_id == span.span_id}
        assert children == {"queue", "prefill", "decode", "stage 0", "stage 1"}
        assert all(
            span.start_time_unix_nano <= event.time_unix_nano <= span.end_time_unix_nano for event in span.events
        )
    for stage in (0, 1):
        for span in collector.named(f"stage {stage}"):
            assert attribute(span, "fastserve.iterations") > 0
            assert attribute(span, "fastserve.compute_seconds") > 0

    names = {event.name for span in schedules for event in span.events}
    assert names == {"preempt", "swap-out", "swap-in", "resume"}
    for span in schedules:
        order = [event.name for event in span.events]
        assert order.count("preempt") == attribute(span, "fastserve.preemptions")
        if "swap-in" in order:
            assert order.index("preempt") <= order.index("swap-out") < order.index("swap-in")
            assert "resume" in order
    moved = [event for span in schedules for event in span.events if event.name.startswith("swap")]
    assert all({item.key for item in event.attributes} == {"bytes", "seconds", "ok"} for event in moved)


async def test_a_request_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    be_quick(monkeypatch)
    slow = FakeOptions(iteration_ns=20_000_000)
    async with collecting() as (collector, endpoint):
        setup_tracing("test", endpoint)
        async with (
            SwapCluster(tmp_path, 1, num_blocks=64, num_slots=8, options=slow) as cluster,
            running(settings(cluster, tmp_path, request_timeout=0.2)) as gateway,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.http_port}", timeout=60) as http,
        ):
            await until_status(http, "/health/ready", 200)
            body = {"prompt": [5], "max_tokens": 200, "ignore_eos": True}
            assert (await http.post("/v1/completions", json=body)).status_code == 504
        await flushed()
        (span,) = collector.named("llm_request")
        assert span.status.code == span.status.STATUS_CODE_ERROR
        assert "did not finish within" in span.status.message
        (schedule,) = collector.named("schedule")
        assert attribute(schedule, "fastserve.finish_reason") == "aborted"


def test_no_exporter_is_imported_when_it_is_off() -> None:
    code = (
        "import sys, fastserve_gateway.__main__, fastserve_scheduler.__main__\n"
        "from fastserve_common.tracing import setup_tracing, tracing\n"
        "setup_tracing('x', '')\n"
        "assert tracing() is None\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry.exporter')]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_standard_variable_turns_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    setup_tracing("x", "")
    on = tracing()
    assert on is not None
    child = on.begin("a", parent=TRACEPARENT).traceparent
    assert child.split("-")[1] == TRACE
    assert child.split("-")[2] != PARENT
    for nonsense in ("", "00-x-y-01", "z" * 10_000, TRACEPARENT + "-more"):
        assert on.begin("a", parent=nonsense).traceparent.split("-")[1] != TRACE
