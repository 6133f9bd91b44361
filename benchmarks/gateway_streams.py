"""What a stream costs the gateway, and what readers that do not read cost their neighbours.

The gateway is a process of its own in front of a scripted scheduler, so nothing but the gateway is measured:
its resident memory with no stream and with all of them open, and the gaps between events that 200 readers see,
first alone and then beside readers that ask for long streams and never read a byte.

    PYTHONPATH=. python benchmarks/gateway_streams.py --streams 1000 --stuck 50
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import resource
import socket
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.gateway.fake_scheduler import FakeScheduler, Script
from tests.gateway.models import write_model
from tests.gateway.test_streams import LONG, wordy_tokenizer

from fastserve.v1 import scheduler_pb2
from fastserve_common.load.stats import percentile
from fastserve_common.state import StateStore, open_state

READERS = 200
TOKENS_PER_S = 5
STUCK_TOKENS_PER_S = 50
PHASE_S = 20.0
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


@dataclass
class Pace:
    """One permit per token for everybody who subscribed."""

    tokens_per_s: float
    gates: dict[str, asyncio.Semaphore] = field(default_factory=dict)

    def script(self, request_id: str, token_id: int) -> Script:
        gate = self.gates.setdefault(request_id, asyncio.Semaphore(1))
        return Script(ids=[token_id], endless=True, gate=gate)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(1 / self.tokens_per_s)
            for gate in self.gates.values():
                gate.release()


@dataclass
class Rig:
    port: int
    pid: int
    readers: Pace
    stuck: Pace
    fake: FakeScheduler

    def resident_bytes(self) -> int:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * resource.getpagesize()

    def cpu_s(self) -> float:
        values = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.asynccontextmanager
async def gateway(folder: Path) -> AsyncIterator[Rig]:
    readers, stuck = Pace(TOKENS_PER_S), Pace(STUCK_TOKENS_PER_S)

    def script(submit: scheduler_pb2.SubmitRequest) -> Script:
        is_stuck = submit.request_id.startswith("stuck")
        return stuck.script(submit.request_id, LONG) if is_stuck else readers.script(submit.request_id, 97)

    fake = FakeScheduler(script, max_model_len=10**6, max_request_tokens=10**6)
    url = f"sqlite://{folder}/state.db"
    store = open_state(url)
    await fake.start(store)
    flags = [f"--state={url}", f"--model-dir={write_model(folder / 'model', tokenizer=wordy_tokenizer())}"]
    flags += ["--port=0", "--grpc-port=-1", "--drain-timeout=0", "--max-buffered-tokens=256", "--log-level=error"]
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "fastserve_gateway", *flags)
    pacing = [asyncio.create_task(pace.run()) for pace in (readers, stuck)]
    try:
        port = await _port(store)
        while await asyncio.to_thread(_status, f"http://127.0.0.1:{port}/health/ready") != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        yield Rig(port, process.pid, readers, stuck, fake)
    finally:
        for task in pacing:
            task.cancel()
        process.terminate()
        await process.wait()
        await fake.stop()
        await store.close()


async def _port(store: StateStore) -> int:
    while not (members := await store.members("gateway")):  # noqa: ASYNC110 - another process says when
        await asyncio.sleep(0.05)
    (info,) = members.values()
    return int(info["http"].rpartition(":")[2])


def _status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def _request(request_id: str) -> bytes:
    body = json.dumps({"prompt": "x", "max_tokens": 900_000, "stream": True, "request_id": request_id}).encode()
    return HEAD % len(body) + body


@dataclass
class Reader:
    """Reads its stream and notes when events came."""

    at_s: list[float] = field(default_factory=list)
    task: asyncio.Task[None] | None = None

    async def run(self, port: int, request_id: str) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(_request(request_id))
        try:
            status = await reader.readline()
            assert b" 200 " in status, status
            while line := await reader.readline():
                if line.startswith(b"data:"):
                    self.at_s.append(time.monotonic())
        finally:
            writer.close()

    def gaps_ms(self, since_s: float, until_s: float) -> list[float]:
        at_s = [moment for moment in self.at_s if since_s <= moment < until_s]
        return [(b - a) * 1000 for a, b in itertools.pairwise(at_s)]


async def _open_readers(rig: Rig, count: int, name: str) -> list[Reader]:
    readers = [Reader() for _ in range(count)]
    for number, reader in enumerate(readers):
        reader.task = asyncio.create_task(reader.run(rig.port, f"{name}-{number}"))
    while not all(reader.at_s for reader in readers):
        await asyncio.sleep(0.05)
        for reader in readers:
            if reader.task is not None and reader.task.done():
                reader.task.result()
    return readers


async def _close(readers: list[Reader]) -> None:
    tasks = [reader.task for reader in readers if reader.task is not None]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def measure_memory(rig: Rig, streams: int) -> dict[str, object]:
    await _close(await _open_readers(rig, 20, "warm"))
    before = rig.resident_bytes()
    readers = await _open_readers(rig, streams, "memory")
    per_stream = (rig.resident_bytes() - before) / streams
    cpu_s, begun_s, seen = rig.cpu_s(), time.monotonic(), sum(len(reader.at_s) for reader in readers)
    await asyncio.sleep(PHASE_S)
    tokens = sum(len(reader.at_s) for reader in readers) - seen
    result: dict[str, object] = {
        "streams": streams,
        "kib_per_stream": round(per_stream / 1024, 1),
        "tokens_per_s": round(tokens / (time.monotonic() - begun_s)),
        "cpu_us_per_token": round((rig.cpu_s() - cpu_s) / tokens * 1e6),
    }
    await _close(readers)
    return result


async def measure_disturbance(rig: Rig, stuck: int) -> dict[str, object]:
    readers = await _open_readers(rig, READERS, "reader")
    alone_s = time.monotonic()
    await asyncio.sleep(PHASE_S)
    begun_s = time.monotonic()
    sockets = [_stuck_reader(rig.port, f"stuck-{number}") for number in range(stuck)]
    await asyncio.sleep(PHASE_S)
    end_s = time.monotonic()
    aborted = sum(job.cancelled is not None for job in rig.fake.jobs if job.submit.request_id.startswith("stuck"))
    for sock in sockets:
        sock.close()
    result: dict[str, object] = {"readers": READERS, "stuck": stuck, "stuck_aborted": aborted}
    for name, since_s, until_s in (("alone", alone_s, begun_s), ("beside_stuck", begun_s, end_s)):
        gaps = sorted(gap for reader in readers for gap in reader.gaps_ms(since_s, until_s))
        result[name] = {f"p{p}_gap_ms": round(percentile(gaps, p), 1) for p in (50, 99)} | {
            "max_gap_ms": round(max(gaps))
        }
    await _close(readers)
    return result


def _stuck_reader(port: int, request_id: str) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", port))
    sock.sendall(_request(request_id))
    return sock


async def main(streams: int, stuck: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with gateway(Path(folder)) as rig:
            memory = await measure_memory(rig, streams)
            disturbance = await measure_disturbance(rig, stuck)
    print(json.dumps({"memory": memory, "disturbance": disturbance}, indent=2))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--stuck", type=int, default=50)
    arguments = parser.parse_args()
    asyncio.run(main(arguments.streams, arguments.stuck))
