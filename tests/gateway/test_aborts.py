"""A caller that leaves, in every way and at every point, ends its request at once; nothing is left behind."""

import asyncio
import gc
import json
import random
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import grpc
import grpc.aio
import pytest

from fastserve.v1 import inference_pb2, scheduler_pb2
from fastserve_common.errors import UnavailableError

from .fake_scheduler import CLIENT, Script
from .rig import Rig, rig, until

FULL = scheduler_pb2.REJECT_REASON_QUEUE_FULL_REQUESTS


def raw_request(r: Rig, *, stream: bool) -> socket.socket:
    """A plain socket, so that the test decides how the connection ends."""
    body = json.dumps({"prompt": "x", "max_tokens": 900, "stream": stream, "request_id": "gone"}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    sock = socket.create_connection(("127.0.0.1", r.gateway.http_port))
    sock.sendall(head % len(body) + body)
    return sock


def finish(sock: socket.socket) -> None:
    sock.close()


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def half_close(sock: socket.socket) -> None:
    sock.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("leave", [finish, reset, half_close])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("tokens", [0, 5])
async def test_connection_ends(
    tmp_path: Path, leave: Callable[[socket.socket], None], stream: bool, tokens: int
) -> None:
    """Queued (no token yet) and decoding."""
    gate = asyncio.Semaphore(tokens)
    async with rig(tmp_path, Script(ids=[97], endless=True, gate=gate)) as r:
        sock = raw_request(r, stream=stream)
        await until(lambda: bool(r.fake.jobs) and r.fake.jobs[0].sent == tokens)
        leave(sock)
        await until(lambda: r.fake.jobs[0].cancelled is not None, timeout_s=5)
        assert r.fake.jobs[0].cancelled == CLIENT
        assert r.fake.jobs[0].sent == tokens
        await r.quiet()
        assert r.outcomes() == {"abort": 1}
        sock.close()


async def test_pipelined_request_does_not_hide_the_end(tmp_path: Path) -> None:
    """A second request on the connection before the first is answered; then the client is gone."""
    gate = asyncio.Semaphore(2)
    async with rig(tmp_path, Script(ids=[97], endless=True, gate=gate)) as r:
        sock = raw_request(r, stream=True)
        sock.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
        await until(lambda: bool(r.fake.jobs) and r.fake.jobs[0].sent == 2)
        reset(sock)
        gate.release()
        gate.release()
        await until(lambda: r.fake.jobs[0].cancelled is not None, timeout_s=5)
        await r.quiet()


def generate(**options: object) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(text="x", **options)  # type: ignore[arg-type]  # checked by protobuf
    request.stopping.max_new_tokens = 900
    return request


async def test_grpc_cancel_and_deadline(tmp_path: Path) -> None:
    gate = asyncio.Semaphore(3)
    async with rig(tmp_path, Script(ids=[97], endless=True, gate=gate)) as r:
        call = r.stub.GenerateStream(generate(request_id="cancelled"))
        for _ in range(3):
            await call.read()
        call.cancel()
        await until(lambda: r.fake.job("cancelled").cancelled == CLIENT)
        unary = r.stub.Generate(generate(request_id="unary"))
        await until(lambda: len(r.fake.jobs) == 2)
        unary.cancel()
        await until(lambda: r.fake.job("unary").cancelled == CLIENT)
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await r.stub.Generate(generate(request_id="late"), timeout=0.3)
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: r.fake.job("late").cancelled == CLIENT)
        stream = r.stub.GenerateStream(generate(request_id="late stream"[:4] + "-s"), timeout=0.3)
        with pytest.raises(grpc.aio.AioRpcError):
            await stream.read()
        await until(lambda: not r.fake.live())
        await r.quiet()
        assert r.outcomes() == {"abort": 4}


async def test_explicit_abort_from_another_connection(tmp_path: Path) -> None:
    gate = asyncio.Semaphore(2)
    async with rig(tmp_path, Script(ids=[97], endless=True, gate=gate)) as r:
        abort = r.stub.Abort
        assert not (await abort(inference_pb2.AbortRequest(request_id="nobody"))).aborted
        streamed = asyncio.create_task(r.stream(prompt="x", max_tokens=900, request_id="s"))
        await until(lambda: bool(r.fake.jobs) and r.fake.job("s").sent == 2)
        await until(lambda: r.metric("generation_tokens_total") == 2)
        assert (await abort(inference_pb2.AbortRequest(request_id="s"))).aborted
        events = await streamed
        assert "".join(event["choices"][0]["text"] for event in events) == "aa"
        assert events[-1]["choices"][0]["finish_reason"] == "abort"
        whole = asyncio.create_task(r.complete(max_tokens=900, request_id="w"))
        await until(lambda: len(r.fake.jobs) == 2)
        assert (await abort(inference_pb2.AbortRequest(request_id="w"))).aborted
        response = await whole
        assert response.status_code == 499
        assert response.json()["error"]["code"] == "aborted"
        unary = asyncio.create_task(_unary(r, "u"))
        await until(lambda: len(r.fake.jobs) == 3)
        assert (await abort(inference_pb2.AbortRequest(request_id="u"))).aborted
        assert (await unary).outputs[0].finish_info.reason == inference_pb2.FINISH_REASON_ABORTED
        await r.quiet()


async def _unary(r: Rig, request_id: str) -> inference_pb2.GenerateResponse:
    response: inference_pb2.GenerateResponse = await r.stub.Generate(generate(request_id=request_id))
    return response


async def test_all_answers_of_n_are_cancelled(tmp_path: Path) -> None:
    async with rig(tmp_path, Script(ids=[97], endless=True, gate=asyncio.Semaphore(3))) as r:
        task = asyncio.create_task(r.complete(n=4, prompt=["x", "y"], max_tokens=900))
        await until(lambda: len(r.fake.jobs) == 8)
        task.cancel()
        await until(lambda: all(job.cancelled == CLIENT for job in r.fake.jobs))
        await r.quiet()
        assert r.outcomes() == {"abort": 8}


async def test_one_refused_answer_cancels_its_siblings(tmp_path: Path) -> None:
    def script(submit: object) -> Script:
        number = getattr(submit, "request_id", "")[-1]
        return (
            Script(reject=FULL, retry_after_ms=1500) if number == "1" else Script(ids=[97], gate=asyncio.Semaphore(0))
        )

    async with rig(tmp_path, script) as r:
        response = await r.complete(n=3)
        assert response.status_code == 429
        assert response.headers["retry-after"] == "2"
        await r.quiet()
        assert r.outcomes() == {"rejected": 1, "abort": 2}


async def test_id_may_be_used_again_at_once(tmp_path: Path) -> None:
    """The scheduler's last word on the first request must not reach the second."""
    async with rig(tmp_path, Script(ids=[*b"abXcd"])) as r:
        for _ in range(20):
            answer = (await r.complete(request_id="again", stop="X", max_tokens=5)).json()
            assert answer["choices"][0]["text"] == "ab"
            assert answer["choices"][0]["finish_reason"] == "stop"
        await r.quiet()


async def test_timeout_is_504(tmp_path: Path) -> None:
    async with rig(tmp_path, Script(ids=[97], endless=True, gate=asyncio.Semaphore(1)), request_timeout=0.2) as r:
        response = await r.complete(max_tokens=9)
        assert response.status_code == 504
        assert response.json()["error"]["type"] == "timeout_error"
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await r.stub.Generate(generate())
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await r.quiet()
        assert r.outcomes() == {"timeout": 2}


def live_tasks() -> int:
    return len([task for task in asyncio.all_tasks() if not task.done()])


@pytest.mark.parametrize("streams", [100, pytest.param(500, marks=pytest.mark.full)])
async def test_mass_cancel_leaks_nothing(tmp_path: Path, streams: int) -> None:
    rng = random.Random(1)
    async with rig(tmp_path, lambda _: Script(ids=[97], endless=True, gate=asyncio.Semaphore(3))) as r:
        await r.complete(max_tokens=3)
        await r.quiet()
        before = live_tasks()

        async def one(number: int) -> None:
            call = r.stub.GenerateStream(generate(request_id=f"r{number}"))
            for _ in range(rng.randrange(4)):
                await call.read()
            call.cancel()
            assert await call.code() is grpc.StatusCode.CANCELLED

        async with asyncio.timeout(60):
            await asyncio.gather(*(one(number) for number in range(streams)))
        await r.quiet()
        gc.collect()
        await until(lambda: live_tasks() <= before)


async def test_error_inside_a_handler_is_a_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancellation from inside a handler must not leave the caller waiting."""
    async with rig(tmp_path) as r:
        engine = r.gateway.engine

        def cancelled(request: object) -> None:
            raise asyncio.CancelledError

        def broken(request: object) -> None:
            raise RuntimeError("a bug")

        def away(request: object) -> None:
            raise UnavailableError("away", retry_after_ms=10)

        for failure, code in [
            (cancelled, grpc.StatusCode.CANCELLED),
            (broken, grpc.StatusCode.INTERNAL),
            (away, grpc.StatusCode.UNAVAILABLE),
        ]:
            monkeypatch.setattr(engine, "open", failure)
            for call in (r.stub.Generate(generate(), timeout=5), r.stub.GenerateStream(generate(), timeout=5)):
                assert await call.code() is code, failure
