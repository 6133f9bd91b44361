"""Health, keys, headers, metrics, the OpenAPI document, settings."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from fastserve.v1 import inference_pb2
from fastserve_common.settings import SettingsError
from fastserve_gateway.http import middleware, protocol
from fastserve_gateway.limits import MAX_HEADER_BYTES, MAX_HEADERS
from fastserve_gateway.settings import GatewaySettings

from .fake_scheduler import Script
from .models import VOCAB_SIZE
from .rig import MODEL, Rig, rig, until


async def test_keys_guard_everything_but_health_and_metrics(tmp_path: Path) -> None:
    async with rig(tmp_path, api_key=("first-key", "second-key")) as r:
        for path in ("/health", "/health/live", "/health/ready", "/metrics"):
            assert (await r.http.get(path)).status_code == 200, path
        for path in ("/v1/models", "/version", "/docs", "/openapi.json", "/nowhere"):
            response = await r.http.get(path)
            assert response.status_code == 401, path
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        for value in ("Bearer wrong", "Bearer", "first-key", "Basic first-key", "Bearer first-key2", "Bearer \u00e9"):
            headers = [(b"authorization", value.encode("latin-1"))]
            response = await r.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
            assert response.status_code == 401, value
        for key in ("first-key", "second-key"):
            headers_ok = {"authorization": f"Bearer {key}"}
            assert (await r.http.post("/v1/completions", json={"prompt": "x"}, headers=headers_ok)).status_code == 200
        async with r.openai(api_key="second-key") as client:
            assert (await client.models.list()).data[0].id == MODEL
        request = inference_pb2.GenerateRequest(text="x")
        for metadata, code in [
            ((), grpc.StatusCode.UNAUTHENTICATED),
            ((("authorization", "Bearer wrong"),), grpc.StatusCode.UNAUTHENTICATED),
            ((("authorization", "Bearer first-key"),), grpc.StatusCode.OK),
        ]:
            stream = r.stub.GenerateStream(request, metadata=metadata)
            info = r.stub.GetModelInfo(inference_pb2.GetModelInfoRequest(), metadata=metadata)
            assert await info.code() is code
            if code is grpc.StatusCode.OK:
                assert len([piece async for piece in stream]) > 1
            assert await stream.code() is code
            assert await r.stub.Generate(request, metadata=metadata).code() is code
        check = await _health(r.channel)
        assert check == health_pb2.HealthCheckResponse.SERVING
        reflection = _reflect(r.channel)
        with pytest.raises(grpc.aio.AioRpcError):
            await reflection.read()


async def _health(channel: grpc.aio.Channel) -> int:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    response = await stub.Check(health_pb2.HealthCheckRequest(service="fastserve.v1.Inference"))
    return int(response.status)


def _reflect(channel: grpc.aio.Channel) -> Any:  # noqa: ANN401 - the async call type exists in the stubs only
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[arg-type]  # typed for the sync API
    return stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))


async def test_grpc_health_follows_readiness_and_reflection_lists_us(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        assert await _health(r.channel) == health_pb2.HealthCheckResponse.SERVING
        r.fake.set_ready(False, "gone")
        stub: Any = health_pb2_grpc.HealthStub(r.channel)
        async for response in stub.Watch(health_pb2.HealthCheckRequest()):
            if response.status == health_pb2.HealthCheckResponse.NOT_SERVING:
                break
        answer = await _reflect(r.channel).read()
        names = {service.name for service in answer.list_services_response.service}
        assert {"fastserve.v1.Inference", "grpc.health.v1.Health"} <= names


async def test_request_id_header_is_echoed_or_made(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        given = await r.http.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "trace-1"})
        assert given.headers["x-request-id"] == "trace-1"
        assert given.json()["id"] == "cmpl-trace-1"
        body_wins = await r.http.post(
            "/v1/completions", json={"prompt": "x", "request_id": "mine"}, headers={"x-request-id": "trace-1"}
        )
        assert body_wins.headers["x-request-id"] == "mine"
        error = await r.http.post("/v1/completions", json={}, headers={"x-request-id": "trace-2"})
        assert (error.status_code, error.headers["x-request-id"]) == (400, "trace-2")
        assert (await r.http.get("/health/live")).headers["x-request-id"]
        bad = await r.http.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "a b#"})
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "request_id")


def raw_exchange(port: int, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
        sock.sendall(data)
        received = b""
        while chunk := sock.recv(65536):
            received += chunk
        return received


async def test_header_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEADER_TIMEOUT_S", 0.2)
    monkeypatch.setattr(middleware, "BODY_TIMEOUT_S", 0.2)
    async with rig(tmp_path) as r:
        port = r.gateway.http_port
        many = b"".join(b"x-%d: 1\r\n" % k for k in range(MAX_HEADERS + 1))
        for head, status, code in [
            (b"GET /version HTTP/1.1\r\n" + many + b"\r\n", b"431", b"too_many_headers"),
            (b"GET /version HTTP/1.1\r\nx: " + b"a" * MAX_HEADER_BYTES + b"\r\n\r\n", b"431", b"headers_too_large"),
            (b"GET /" + b"a" * MAX_HEADER_BYTES + b" HTTP/1.1\r\n\r\n", b"431", b"headers_too_large"),
            (b"nonsense\r\n\r\n", b"400", b"invalid_http"),
            (b"GET /version HT", b"408", b"request_timeout"),
            (b"", b"408", b"request_timeout"),
        ]:
            reply = await asyncio.to_thread(raw_exchange, port, head)
            assert reply.startswith(b"HTTP/1.1 " + status), reply[:60]
            assert b'"code": "' + code in reply
            assert b"application/json" in reply
        slow = b"POST /tokenize HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 10\r\n\r\n{"
        reply = await asyncio.to_thread(raw_exchange, port, slow)
        assert reply.startswith(b"HTTP/1.1 408")
        few = b"".join(b"x-%d: 1\r\n" % k for k in range(MAX_HEADERS - 1))
        fine = b"GET /version HTTP/1.1\r\nconnection: close\r\n" + few + b"\r\n"
        assert (await asyncio.to_thread(raw_exchange, port, fine)).startswith(b"HTTP/1.1 200")


def _waiting(r: Rig) -> tuple[float, float]:
    """For their turn, and for a scheduler that serves."""
    capacity, deferred = (
        r.metric("num_requests_waiting_by_reason", reason=reason) for reason in ("capacity", "deferred")
    )
    assert capacity + deferred == r.metric("num_requests_waiting")
    return capacity, deferred


async def test_metrics_are_complete_and_return_to_zero(tmp_path: Path) -> None:
    gate = asyncio.Semaphore(0)
    async with rig(tmp_path, Script(ids=[*b"ab"], gate=gate), vllm_metric_names=True) as r:
        tasks = [asyncio.create_task(r.complete(max_tokens=2)) for _ in range(3)]
        await until(lambda: r.metric("num_requests_waiting") == 3)
        assert _waiting(r) == (3, 0)
        r.fake.set_ready(False)
        await until(lambda: _waiting(r) == (0, 3))
        r.fake.set_ready(True)
        await until(lambda: _waiting(r) == (3, 0))
        gate.release()
        await until(lambda: r.metric("num_requests_running") == 1)
        assert r.metric("num_requests_waiting") == 2
        for _ in range(5):
            gate.release()
        await asyncio.gather(*tasks)
        await r.quiet()
        assert r.metric("prompt_tokens_total") == 3
        assert r.metric("generation_tokens_total") == 6
        assert r.metric("request_generation_tokens_sum") == 6
        assert r.metric("time_to_first_token_seconds_count") == 3
        assert r.metric("inter_token_latency_seconds_count") == 3
        assert r.metric("e2e_request_latency_seconds_count") == 3
        assert r.metric("http_requests_total", path="/v1/completions", status="200") == 3
        assert r.metric("scheduler_connected") == 1
        assert 'vllm:num_requests_waiting{engine="0",model_name="tiny"} 0.0' in (await r.http.get("/metrics")).text


async def test_mass_abort_ends_in_clean_metrics(tmp_path: Path) -> None:
    async with rig(tmp_path, Script(ids=[97], endless=True, gate=asyncio.Semaphore(40))) as r:
        tasks = [asyncio.create_task(r.stream(prompt="x", max_tokens=900)) for _ in range(100)]
        await until(lambda: len(r.fake.jobs) == 100 and r.metric("generation_tokens_total") == 40)
        for task in tasks:
            task.cancel()
        await r.quiet()
        assert r.outcomes() == {"abort": 100}
        assert r.metric("prompt_tokens_total") == 100
        assert r.metric("request_generation_tokens_sum") == 40


async def test_openapi_document_tells_the_truth(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        document = (await r.http.get("/openapi.json")).json()
        assert set(document["paths"]) == {
            "/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/{model}", "/tokenize", "/detokenize",
            "/health", "/health/live", "/health/ready", "/version", "/metrics", "/dashboard/state",
        }  # fmt: skip
        for operations in document["paths"].values():
            for operation in operations.values():
                assert "422" not in operation["responses"]
        errors = document["paths"]["/v1/completions"]["post"]["responses"]
        assert {"400", "401", "404", "413", "429", "499", "503", "504"} <= set(errors)
        assert set(errors["200"]["content"]) == {"application/json", "text/event-stream"}
        schema = document["components"]["schemas"]["CompletionRequest"]
        assert schema["additionalProperties"] is False
        assert "tools" not in schema["properties"]
        tokens = document["components"]["schemas"]["DetokenizeRequest"]["properties"]["tokens"]
        assert tokens["items"] == {"type": "integer", "minimum": 0, "maximum": VOCAB_SIZE - 1}
        assert str(2**32 - 1) not in str(schema["properties"]["prompt"]), "every id has its bound"


async def test_models_have_every_served_name(tmp_path: Path) -> None:
    async with rig(tmp_path, served_model_name=("tiny", "alias"), model_root="org/tiny") as r:
        models = (await r.http.get("/v1/models")).json()
        assert [(m["id"], m["root"]) for m in models["data"]] == [("tiny", "org/tiny"), ("alias", "org/tiny")]
        assert (await r.complete(model="alias")).json()["model"] == "alias"
        assert (await r.complete()).json()["model"] == "tiny"
        assert (await r.http.get("/v1/models/alias")).json()["id"] == "alias"
        assert (await r.http.get("/version")).json()["version"]


async def test_grpc_can_be_off(tmp_path: Path) -> None:
    async with rig(tmp_path, grpc_port=-1) as r:
        assert r.gateway.grpc_port is None
        assert (await r.complete()).status_code == 200


async def test_gateway_is_a_member_while_it_runs(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        (info,) = (await r.store.members("gateway")).values()
        assert info == {
            "http": f"127.0.0.1:{r.gateway.http_port}",
            "grpc": f"127.0.0.1:{r.gateway.grpc_port}",
        }


async def test_taken_port_is_a_sentence(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        with pytest.raises(OSError, match="cannot listen on"):
            async with rig(tmp_path / "second", port=r.gateway.http_port):
                pass
        assert (await r.complete()).status_code == 200


def test_settings_refuse_without_repeating_keys() -> None:
    base = ["--state", "sqlite:///x", "--model-dir", "m"]
    with pytest.raises(SettingsError, match="--api-key") as error:
        GatewaySettings.load([*base, "--api-key", "se cret"], prog="t")
    assert "cret" not in str(error.value)
    with pytest.raises(SettingsError, match="--ssl-certfile"):
        GatewaySettings.load([*base, "--ssl-certfile", "x"], prog="t")
    loaded = GatewaySettings.load([*base, "--api-key", "a", "--api-key", "b", "--drain-timeout", "3"], prog="t")
    assert loaded.api_key == ("a", "b")
    assert loaded.drain_timeout == 3
    assert loaded.model_names == ("m",)


async def test_draining_refuses_new_and_finishes_old(tmp_path: Path) -> None:
    gate = asyncio.Semaphore(1)
    async with rig(tmp_path, Script(ids=[*b"ab"], gate=gate)) as r:
        old = asyncio.create_task(r.complete(max_tokens=2))
        await until(lambda: r.metric("num_requests_running") == 1)
        r.gateway.engine.start_draining()
        assert (await r.http.get("/health/ready")).status_code == 503
        assert (await r.http.get("/health/live")).status_code == 200
        new = await r.complete()
        assert (new.status_code, new.headers["retry-after"]) == (503, "1")
        assert not await r.gateway.engine.drained(0.05) or old.done()
        response = await old
        assert response.status_code == 503, "the drain time was over"
        assert isinstance(response, httpx.Response)
        assert await r.gateway.engine.drained(5)


async def test_time_per_token_is_of_answers_with_two_tokens_and_more(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        for tokens in (1, 2, 5):
            assert (await r.complete(max_tokens=tokens)).status_code == 200
        name = "request_time_per_output_token_seconds"
        assert r.metric(f"{name}_count") == 2
        assert 0 < r.metric(f"{name}_sum") <= r.metric("e2e_request_latency_seconds_sum")


async def test_vllm_names_repeat_what_vllm_has_and_nothing_else(tmp_path: Path) -> None:
    async with rig(tmp_path, vllm_metric_names=True) as r:
        assert (await r.complete(max_tokens=2)).status_code == 200
        lines = (await r.http.get("/metrics")).text.splitlines()
        ours = {line for line in lines if "fastserve:" in line}
        theirs = {line.replace("vllm:", "fastserve:").replace('engine="0",', "") for line in lines if "vllm:" in line}
        assert theirs < ours
        alone = {line.partition(" ")[0].partition("{")[0] for line in ours - theirs if not line.startswith("#")}
        assert {name.removesuffix("_total").removesuffix("_created") for name in alone} == {
            "fastserve:requests_accepted",
            "fastserve:rate_limit_unchecked",
            "fastserve:http_requests",
            "fastserve:scheduler_connected",
            "fastserve:group_ready",
            "fastserve:group_requests",
        }
        assert len([line for line in lines if line.startswith("process_open_fds ")]) == 1


async def test_the_longest_answer_of_a_request_is_told_once(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        assert (await r.complete(max_tokens=5, n=3)).status_code == 200
        assert (await r.complete(max_tokens=2)).status_code == 200
        assert r.metric("request_max_num_generation_tokens_count") == r.metric("request_params_n_count") == 2
        assert r.metric("request_max_num_generation_tokens_sum") == 5 + 2
        assert r.metric("request_generation_tokens_sum") == 3 * 5 + 2
