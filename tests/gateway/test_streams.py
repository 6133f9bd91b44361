"""Many streams at once, and readers that do not read."""

import asyncio
import contextlib
import json
import resource
import socket
from pathlib import Path

import grpc
import pytest
from tokenizers import AddedToken, Tokenizer

from fastserve.v1 import inference_pb2, scheduler_pb2
from fastserve_gateway import server
from fastserve_gateway.engine import session as session_module
from fastserve_gateway.http import exchange, protocol
from fastserve_gateway.server import raise_fd_limit

from .fake_scheduler import CLIENT, Script
from .models import TOOL, byte_tokenizer
from .rig import Rig, parse_events, resident_bytes, rig, until


@pytest.mark.parametrize("streams", [200, pytest.param(1000, marks=pytest.mark.full)])
async def test_idle_streams_hold(tmp_path: Path, streams: int) -> None:
    """All open at once, a token now and then; each comes out whole, memory per stream is bounded."""
    gates = [asyncio.Semaphore(1) for _ in range(streams)]
    scripts = {f"s{k}": Script(ids=[*b"abc"], gate=gate) for k, gate in enumerate(gates)}
    async with rig(tmp_path, lambda submit: scripts[submit.request_id]) as r:
        before = resident_bytes()
        body = {"prompt": "x", "max_tokens": 3}
        tasks = [asyncio.create_task(r.stream(**body, request_id=f"s{k}")) for k in range(streams)]
        await until(lambda: r.metric("num_requests_running") == streams, timeout_s=60)
        # Both ends of every connection live in this process.
        assert (resident_bytes() - before) / streams < 512 * 1024
        assert (await r.http.get("/health/ready")).status_code == 200
        for gate in gates:
            gate.release()
            gate.release()
        for events in await asyncio.gather(*tasks):
            assert "".join(event["choices"][0]["text"] for event in events) == "abc"
        await r.quiet()


def test_fd_limit_is_raised_to_the_hard_one() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard - 1), hard))
        assert raise_fd_limit() == hard
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def wordy_tokenizer() -> Tokenizer:
    """One token is a long text, so that a few hundred fill every buffer between the gateway and a client."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<" + "long " * 3000 + ">", special=False)])
    return tokenizer


LONG = TOOL + 1
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


def stuck_reader(port: int) -> socket.socket:
    """A client that asks for a stream and never reads."""
    body = json.dumps({"prompt": "x", "max_tokens": 50_000, "stream": True, "request_id": "stuck"}).encode()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", port))
    sock.sendall(HEAD % len(body) + body)
    return sock


def drain(sock: socket.socket) -> int:
    """Bytes until the other end closes."""
    sock.settimeout(30)
    total = 0
    with contextlib.suppress(ConnectionResetError):
        while chunk := sock.recv(2**20):
            total += len(chunk)
    return total


async def test_reader_that_does_not_read_is_aborted_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "STUCK_GRACE_S", 0.05)
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 1)
    gate = asyncio.Semaphore(0)

    def script(submit: scheduler_pb2.SubmitRequest) -> Script:
        if submit.request_id == "stuck":
            return Script(ids=[LONG], endless=True)
        return Script(ids=[*b"neighbour"], gate=gate)

    async with rig(tmp_path, script, tokenizer=wordy_tokenizer(), max_buffered_tokens=50) as r:
        await raise_limit(r)
        neighbour = asyncio.create_task(r.stream(prompt="x", max_tokens=9))
        sock = stuck_reader(r.gateway.http_port)
        await until(lambda: any(job.cancelled == CLIENT for job in r.fake.jobs), timeout_s=60)
        assert r.fake.job("stuck").sent < 50_000
        await until(lambda: "stuck" not in r.gateway.engine._sessions)
        with sock:
            assert await asyncio.to_thread(drain, sock) > 0, "the answer ended, and the connection is idle, then closed"
        for _ in range(9):
            gate.release()
        events = await neighbour
        assert "".join(event["choices"][0]["text"] for event in events) == "neighbour"
        await r.quiet()
        assert r.outcomes() == {"abort": 1, "length": 1}


async def test_unread_answer_does_not_hold_its_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole answer, larger than every buffer, to a client that does not read it."""
    monkeypatch.setattr(protocol, "WRITE_TIMEOUT_S", 0.2)
    lost = asyncio.Event()
    connection_lost = protocol.LimitedHttpProtocol.connection_lost

    def observed(connection: protocol.LimitedHttpProtocol, exc: Exception | None) -> None:
        connection_lost(connection, exc)
        lost.set()

    monkeypatch.setattr(protocol.LimitedHttpProtocol, "connection_lost", observed)
    async with rig(tmp_path, Script(ids=[LONG], endless=True), tokenizer=wordy_tokenizer()) as r:
        sock = socket.create_connection(("127.0.0.1", r.gateway.http_port))
        lost.clear()
        body = json.dumps({"prompt": "x", "max_tokens": 900}).encode()
        sock.sendall(HEAD % len(body) + body)
        async with asyncio.timeout(30):
            await lost.wait()
        assert await asyncio.to_thread(drain, sock) < 900 * 15_000
        sock.close()
        await r.quiet()


async def raise_limit(r: Rig) -> None:
    r.fake.max_model_len = 60_000
    r.fake.set_limit(60_000)
    await until(lambda: r.gateway.engine.max_model_len == 60_000)


async def test_stuck_grpc_reader_is_aborted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "STUCK_GRACE_S", 0.05)
    script = Script(ids=[LONG], endless=True)
    async with rig(tmp_path, script, tokenizer=wordy_tokenizer(), max_buffered_tokens=50) as r:
        await raise_limit(r)
        request = inference_pb2.GenerateRequest(text="x", request_id="stuck")
        request.stopping.max_new_tokens = 50_000
        call = r.stub.GenerateStream(request)
        await call.read()
        await until(lambda: r.fake.job("stuck").cancelled == CLIENT, timeout_s=60)
        await until(lambda: not r.gateway.engine._sessions)
        call.cancel()
        assert await call.code() is grpc.StatusCode.CANCELLED
        await r.quiet()


async def test_waiting_streams_send_heartbeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A queued stream shows life; the comments are no events."""
    monkeypatch.setattr(exchange, "HEARTBEAT_S", 0.02)
    gate = asyncio.Semaphore(0)
    async with rig(tmp_path, Script(ids=[97], gate=gate)) as r:
        async with r.http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as response:
            assert response.status_code == 200
            lines = response.aiter_lines()
            assert await anext(lines) == ": waiting"
            gate.release()
            rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        raw = b": waiting\n\n" + "".join(f"{line}\n\n" for line in rest).encode()
        assert parse_events(raw)[0]["choices"][0]["text"] == "a"
        async with r.openai() as client:
            gate.release()
            stream = await client.completions.create(model="tiny", prompt="x", stream=True)
            assert "".join([chunk.choices[0].text async for chunk in stream]) == "a"


async def test_every_event_is_valid_json_in_whole_characters(tmp_path: Path) -> None:
    family = "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466"
    async with rig(tmp_path, Script(ids=[*f'"{family}"\\\n\u2028'.encode(), 0xFF, 0xE4])) as r:
        async with r.http.stream(
            "POST", "/v1/completions", json={"prompt": "x", "stream": True, "max_tokens": 99}
        ) as s:
            pieces = [piece async for piece in s.aiter_raw()]
        for piece in pieces:
            piece.decode("utf-8")
        texts = [event["choices"][0]["text"] for event in parse_events(b"".join(pieces))]
        assert "".join(texts) == f'"{family}"\\\n\u2028\ufffd\ufffd'
