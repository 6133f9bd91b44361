"""Limits at the edge: what can never fit, what does not fit now, and what is too large to look at."""

import asyncio
import gc
from pathlib import Path

import grpc
import grpc.aio
import pytest

from fastserve.v1 import inference_pb2, sampling_pb2, scheduler_pb2
from fastserve_common.channels import MAX_MESSAGE_BYTES
from fastserve_common.errors import RETRY_AFTER_METADATA
from fastserve_gateway.limits import MAX_LOGPROBS

from .fake_scheduler import Script
from .rig import Rig, resident_bytes, rig, until


async def grpc_error(r: Rig, request: inference_pb2.GenerateRequest) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as unary:
        await r.stub.Generate(request)
    with pytest.raises(grpc.aio.AioRpcError) as stream:
        await r.stub.GenerateStream(request).read()
    assert unary.value.code() is stream.value.code()
    return unary.value


async def test_advertised_length_is_the_enforced_one(tmp_path: Path) -> None:
    """Around the limit, in HTTP and gRPC; it follows what the scheduler says, and the operator may lower it."""
    async with rig(tmp_path, max_model_len=90) as r:
        for pool, limit in ((64, 64), (50, 50), (500, 90)):
            r.fake.set_limit(pool)
            await until(lambda limit=limit: r.gateway.engine.max_model_len == limit)  # type: ignore[misc]
            models = (await r.http.get("/v1/models")).json()["data"]
            assert [model["max_model_len"] for model in models] == [limit]
            info = await r.stub.GetModelInfo(inference_pb2.GetModelInfoRequest())
            assert info.max_model_len == limit
            assert (info.policy, info.num_stages, list(info.eos_token_ids)) == ("fake", 2, [258, 259])
            for extra, accepted in ((-1, True), (0, True), (1, False)):
                body = {"prompt": "x" * 20, "max_tokens": limit - 20 + extra}
                response = await r.complete(**body)
                assert response.status_code == (200 if accepted else 400), (limit, extra)
                request = inference_pb2.GenerateRequest(text="x" * 20)
                request.stopping.max_new_tokens = limit - 20 + extra
                if accepted:
                    await r.stub.Generate(request)
                    continue
                error = response.json()["error"]
                assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
                assert f"{limit} tokens (max_model_len)" in error["message"]
                refused = await grpc_error(r, request)
                assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert f"{limit} tokens" in (refused.details() or "")
            full = await r.complete(prompt="x" * limit, max_tokens=1)
            assert full.json()["error"]["code"] == "context_length_exceeded"
            default = await r.complete(prompt="x" * (limit - 3), request_id="fits")
            assert default.status_code == 200
            assert r.fake.job("fits").submit.max_tokens == 3, "a default never makes a request too long"


async def test_scheduler_refusals_have_their_status(tmp_path: Path) -> None:
    reasons = scheduler_pb2.RejectReason
    cases = {
        "TOO_LONG": (400, grpc.StatusCode.INVALID_ARGUMENT, False),
        "INVALID": (400, grpc.StatusCode.INVALID_ARGUMENT, False),
        "QUEUE_FULL_REQUESTS": (429, grpc.StatusCode.RESOURCE_EXHAUSTED, True),
        "QUEUE_FULL_TOKENS": (429, grpc.StatusCode.RESOURCE_EXHAUSTED, True),
        "DUPLICATE_ID": (400, grpc.StatusCode.ALREADY_EXISTS, False),
        "NOT_READY": (503, grpc.StatusCode.UNAVAILABLE, True),
        "DRAINING": (503, grpc.StatusCode.UNAVAILABLE, True),
    }
    async with rig(
        tmp_path,
        lambda submit: Script(
            reject=reasons.Value(f"REJECT_REASON_{submit.request_id.partition('-')[0]}"), retry_after_ms=2300
        ),
    ) as r:
        for name, (status, code, retry) in cases.items():
            for stream in (False, True):
                response = await r.complete(request_id=f"{name}-http", stream=stream)
                assert response.status_code == status, name
                assert response.headers.get("retry-after") == ("3" if retry else None), name
                assert response.json()["error"]["message"] == "refused by the script"
            error = await grpc_error(r, inference_pb2.GenerateRequest(text="x", request_id=f"{name}-grpc"))
            assert error.code() is code, name
            metadata = dict(error.trailing_metadata() or ())
            assert metadata.get(RETRY_AFTER_METADATA) == ("2300" if retry else None), name
        await r.quiet()
        assert set(r.outcomes()) == {"rejected"}
        assert r.metric("prompt_tokens_total") == 0


async def test_full_queue_is_refused_at_once_and_nothing_leaks(tmp_path: Path) -> None:
    """100 at once against a queue of 8, again and again; then a new one is accepted."""
    waiting: set[str] = set()
    gate = asyncio.Semaphore(0)

    def script(submit: scheduler_pb2.SubmitRequest) -> Script:
        if len(waiting) >= 8:
            return Script(reject=scheduler_pb2.REJECT_REASON_QUEUE_FULL_REQUESTS, retry_after_ms=100)
        waiting.add(submit.request_id)
        return Script(ids=[97], gate=gate)

    async with rig(tmp_path, script) as r:
        for _ in range(5):
            requests = [asyncio.create_task(r.complete(max_tokens=1)) for _ in range(100)]
            await until(lambda tasks=requests: sum(task.done() for task in tasks) == 92)  # type: ignore[misc]
            assert r.metric("num_requests_waiting") == 8
            for _ in range(8):
                gate.release()
            statuses = [(await task).status_code for task in requests]
            assert sorted(statuses) == [200] * 8 + [429] * 92
            waiting.clear()
        assert r.metric("admission_rejections_total", reason="max_num_queued_reqs") == 5 * 92
        gate.release()
        assert (await r.complete(max_tokens=1)).status_code == 200
        await r.quiet()


async def test_concurrency_cap_counts_answers(tmp_path: Path) -> None:
    gate = asyncio.Semaphore(0)
    async with rig(tmp_path, Script(ids=[97], gate=gate), max_concurrent_requests=4) as r:
        first = asyncio.create_task(r.complete(max_tokens=1, n=3))
        await until(lambda: len(r.fake.jobs) == 3)
        refused = await r.complete(n=2)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert "max_concurrent_requests" in refused.json()["error"]["message"]
        assert r.metric("admission_rejections_total", reason="max_concurrent_requests") == 1
        error = await grpc_error(
            r, inference_pb2.GenerateRequest(text="x", sampling=inference_pb2.Sampling(num_sequences=2))
        )
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for _ in range(4):
            gate.release()
        fourth = await r.complete(max_tokens=1)
        assert (await first).status_code == fourth.status_code == 200
        await r.quiet()


async def test_live_id_is_refused_and_the_live_request_undisturbed(tmp_path: Path) -> None:
    gate = asyncio.Semaphore(0)
    async with rig(tmp_path, Script(ids=[97], gate=gate)) as r:
        first = asyncio.create_task(r.complete(max_tokens=1, request_id="same"))
        await until(lambda: len(r.fake.jobs) == 1)
        second = await r.complete(request_id="same")
        assert second.status_code == 400
        assert second.json()["error"]["param"] == "request_id"
        assert second.json()["error"]["code"] == "duplicate_request_id"
        header = await r.http.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "same"})
        assert header.status_code == 400
        error = await grpc_error(r, inference_pb2.GenerateRequest(text="x", request_id="same"))
        assert error.code() is grpc.StatusCode.ALREADY_EXISTS
        gate.release()
        assert (await first).json()["choices"][0]["text"] == "a"
        assert len(r.fake.jobs) == 1


MIB = 1024 * 1024


async def test_large_messages_meet_an_explicit_limit(tmp_path: Path) -> None:
    """3.9, 4.1 and 16 MiB: the first is looked at (and too long for the model), the others are too large."""
    async with rig(tmp_path) as r:
        for size, status, problem in [
            (39 * MIB // 10, 400, "maximum context length"),
            (41 * MIB // 10, 400, "the limit is 4194304"),
            (16 * MIB, 413, "max_body_bytes"),
        ]:
            response = await r.complete(prompt="x" * size)
            assert response.status_code == status, size
            assert problem in response.json()["error"]["message"]
            if size < MAX_MESSAGE_BYTES:
                error = await grpc_error(r, inference_pb2.GenerateRequest(text="x" * size))
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        too_large = inference_pb2.GenerateRequest(text="x" * (MAX_MESSAGE_BYTES + 1))
        unlimited = (("grpc.max_send_message_length", -1),)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{r.gateway.grpc_port}", options=unlimited) as channel:
            call = channel.unary_unary(
                "/fastserve.v1.Inference/Generate",
                request_serializer=inference_pb2.GenerateRequest.SerializeToString,
                response_deserializer=inference_pb2.GenerateResponse.FromString,
            )
            with pytest.raises(grpc.aio.AioRpcError) as error_info:
                await call(too_large)
        assert error_info.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await r.complete()).status_code == 200
        assert len(r.fake.jobs) == 1


async def test_body_limit_holds_without_a_declared_length(tmp_path: Path) -> None:
    async with rig(tmp_path, max_body_bytes=1024) as r:

        async def chunks() -> object:
            for _ in range(64):
                yield b" " * 1024

        response = await r.http.post(
            "/v1/completions",
            content=chunks(),  # type: ignore[arg-type]  # an async generator of bytes
            headers={"content-type": "application/json"},
        )
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"
        exact = b'{"prompt":"x"' + b" " * 1010 + b"}"
        assert len(exact) == 1024
        for body, status in ((exact, 200), (exact + b" ", 413)):
            response = await r.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
            assert response.status_code == status


def _most_logprobs(token_id: int) -> sampling_pb2.TokenLogprobs:
    top = [sampling_pb2.TopLogprob(token_id=k, logprob=-0.1 * k) for k in range(MAX_LOGPROBS)]
    return sampling_pb2.TokenLogprobs(token_id=token_id, logprob=-1.0, top=top)


async def test_many_logprobs_are_capped_and_leave_nothing(tmp_path: Path) -> None:
    """64 answers at once with all the log-probabilities there can be: memory does not grow from round to round."""
    async with rig(tmp_path, Script(ids=[97], endless=True, logprobs=_most_logprobs)) as r:
        resident: list[int] = []
        for _ in range(4):
            whole = [r.complete(logprobs=MAX_LOGPROBS, max_tokens=50) for _ in range(32)]
            streams = [r.stream(prompt="x", logprobs=MAX_LOGPROBS, max_tokens=50) for _ in range(32)]
            responses, events = await asyncio.gather(asyncio.gather(*whole), asyncio.gather(*streams))
            for response in responses:
                logprobs = response.json()["choices"][0]["logprobs"]
                assert [len(top) for top in logprobs["top_logprobs"]] == [MAX_LOGPROBS] * 50
            assert {
                sum(len(e["choices"][0]["logprobs"]["tokens"]) for e in es if e["choices"][0]["logprobs"])
                for es in events
            } == {50}
            await r.quiet()
            r.fake.jobs.clear()
            del whole, streams, responses, events
            gc.collect()
            resident.append(resident_bytes())
        assert resident[-1] - resident[0] < 32 * 1024**2
        assert (await r.complete(logprobs=21)).status_code == 400
        assert (await r.chat(logprobs=True, top_logprobs=21)).status_code == 400
        request = inference_pb2.GenerateRequest(text="x", response=inference_pb2.ResponseOptions(logprobs=21))
        assert (await grpc_error(r, request)).code() is grpc.StatusCode.INVALID_ARGUMENT
