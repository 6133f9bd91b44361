"""The gateway as a process: flags in, sentences out, an ordered end."""

import asyncio
import contextlib
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import httpx
import pytest

from fastserve.v1 import inference_pb2, inference_pb2_grpc
from fastserve_common.lifecycle import EXIT_FORCED
from fastserve_common.state import StateStore, open_state

from .fake_scheduler import FakeScheduler, Script
from .models import write_model
from .rig import until, until_status

pytestmark = pytest.mark.cluster


class Running:
    def __init__(self, process: asyncio.subprocess.Process, store: StateStore, info: dict[str, str]) -> None:
        self.process = process
        self.store = store
        self.info = info


@contextlib.asynccontextmanager
async def gateway(tmp_path: Path, store: StateStore, *flags: str) -> AsyncIterator[Running]:
    model = write_model(tmp_path / "model")
    command = [sys.executable, "-m", "fastserve_gateway", "--state", f"sqlite://{tmp_path}/state.db"]
    command += ["--model-dir", str(model), "--port", "0", "--log-format", "json", *flags]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
    try:
        async with asyncio.timeout(60):
            while not (members := await store.members("gateway")):
                assert process.returncode is None
                await asyncio.sleep(0.02)
        yield Running(process, store, next(iter(members.values())))
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@contextlib.asynccontextmanager
async def scheduler(tmp_path: Path, script: Script) -> AsyncIterator[tuple[FakeScheduler, StateStore]]:
    fake = FakeScheduler(lambda _: script)
    store = open_state(f"sqlite://{tmp_path}/state.db")
    await fake.start(store)
    try:
        yield fake, store
    finally:
        await fake.stop()
        await store.close()


async def test_sigterm_finishes_what_runs_and_refuses_the_rest(tmp_path: Path) -> None:
    gate = asyncio.Semaphore(1)
    async with (
        scheduler(tmp_path, Script(ids=[*b"abc"], gate=gate)) as (fake, store),
        gateway(tmp_path, store, "--drain-timeout", "30") as running,
        httpx.AsyncClient(base_url=f"http://{running.info['http']}", timeout=30) as http,
    ):
        await until_status(http, "/health/ready", 200)
        old = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3}))
        await until(lambda: bool(fake.jobs) and fake.jobs[0].sent == 1)
        running.process.send_signal(signal.SIGTERM)
        await until_status(http, "/health/ready", 503)
        assert (await http.post("/v1/completions", json={"prompt": "x"})).status_code == 503
        for _ in range(2):
            gate.release()
        assert (await old).json()["choices"][0]["text"] == "abc"
        assert await running.process.wait() == 0
        assert await store.members("gateway") == {}


async def test_stuck_request_cannot_hold_the_end(tmp_path: Path) -> None:
    async with (
        scheduler(tmp_path, Script(ids=[97], gate=asyncio.Semaphore(1), endless=True)) as (fake, store),
        gateway(tmp_path, store, "--drain-timeout", "0.2") as running,
        httpx.AsyncClient(base_url=f"http://{running.info['http']}", timeout=30) as http,
    ):
        await until_status(http, "/health/ready", 200)
        stuck = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x", "max_tokens": 9}))
        await until(lambda: bool(fake.jobs) and fake.jobs[0].sent == 1)
        running.process.send_signal(signal.SIGTERM)
        response = await stuck
        assert response.status_code == 503
        assert "shutting down" in response.json()["error"]["message"]
        async with asyncio.timeout(20):
            assert await running.process.wait() == 0


async def test_second_signal_ends_at_once(tmp_path: Path) -> None:
    async with (
        scheduler(tmp_path, Script(ids=[97], gate=asyncio.Semaphore(1), endless=True)) as (fake, store),
        gateway(tmp_path, store, "--drain-timeout", "600") as running,
        httpx.AsyncClient(base_url=f"http://{running.info['http']}", timeout=30) as http,
    ):
        await until_status(http, "/health/ready", 200)
        stuck = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x", "max_tokens": 9}))
        await until(lambda: bool(fake.jobs) and fake.jobs[0].sent == 1)
        running.process.send_signal(signal.SIGINT)
        await until_status(http, "/health/ready", 503)
        running.process.send_signal(signal.SIGINT)
        assert await running.process.wait() == EXIT_FORCED
        with pytest.raises(httpx.TransportError):
            await stuck


def openssl(folder: Path) -> tuple[Path, Path]:
    key, certificate = folder / "key.pem", folder / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return key, certificate


async def test_tls_for_both(tmp_path: Path) -> None:
    key, certificate = openssl(tmp_path)
    flags = ("--ssl-keyfile", str(key), "--ssl-certfile", str(certificate))
    async with (
        scheduler(tmp_path, Script(ids=[*b"abc"])) as (_, store),
        gateway(tmp_path, store, *flags) as running,
        httpx.AsyncClient(
            base_url=f"https://{running.info['http']}", verify=ssl.create_default_context(cafile=str(certificate))
        ) as http,
    ):
        await until_status(http, "/health/ready", 200)
        answer = await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3})
        assert answer.json()["choices"][0]["text"] == "abc"
        credentials = grpc.ssl_channel_credentials(certificate.read_bytes())
        async with grpc.aio.secure_channel(running.info["grpc"], credentials) as channel:
            request = inference_pb2.GenerateRequest(text="x")
            request.stopping.max_new_tokens = 3
            response = await inference_pb2_grpc.InferenceStub(channel).Generate(request)
            assert response.outputs[0].text == "abc"


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--state", "file:///x", "--model-dir", "{model}"), "expected sqlite"),
        (("--state", "sqlite:///x/y", "--model-dir", "/nowhere"), "no readable tokenizer.json"),
        (("--model-dir", "{model}"), "--state"),
        (("--state", "{state}", "--model-dir", "{model}", "--port", "70000"), "--port"),
        (("--state", "{state}", "--model-dir", "{model}", "--nonsense", "1"), "--nonsense"),
        (("--state", "{state}", "--model-dir", "{model}", "--ssl-certfile", "x", "--ssl-keyfile", "y"), "No such file"),
    ],
)
def test_wrong_settings_are_one_sentence(tmp_path: Path, flags: tuple[str, ...], problem: str) -> None:
    names = {"model": str(write_model(tmp_path / "model")), "state": f"sqlite://{tmp_path}/state.db"}
    command = [sys.executable, "-m", "fastserve_gateway", *(flag.format(**names) for flag in flags)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=dict(os.environ), check=False)
    assert done.returncode == 2
    assert problem in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


def test_needs_no_deep_learning_library() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None; "
        "import fastserve_gateway.__main__; assert 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
