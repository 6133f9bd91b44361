"""litellm, a gRPC client that knows the service by reflection, and a public load generator, against real processes."""

import asyncio
import json
import os
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.cluster.system import System
from tests.gateway.fake_scheduler import Script
from tests.gateway.rig import until_status
from tests.gateway.test_process import gateway, openssl, scheduler

from fastserve_worker.fake_stage import fake_answer

#: Importing a client takes long on a slow machine.
CLIENT_PATIENCE_S = 500.0

pytestmark = [pytest.mark.infra, pytest.mark.timeout(CLIENT_PATIENCE_S + 200)]

HERE = Path(__file__).parent
KEY = "fsk-of-the-clients-0123456789"

Start = Callable[..., System]


def run(python: Path, script: str, *arguments: object) -> dict[str, Any]:
    command = [str(python), str(HERE / script), *map(str, arguments)]
    done = execute(command)
    return dict(json.loads(done.stdout))


def execute(command: list[str], **variables: str) -> "subprocess.CompletedProcess[str]":
    """litellm would ask the world for prices."""
    env = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", **variables}
    done = subprocess.run(command, capture_output=True, text=True, timeout=CLIENT_PATIENCE_S, env=env, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_litellm(python: Path, start: Start) -> None:
    system = start(f"--api-key={KEY}")
    system.wait_ready()
    answer = run(python, "with_litellm.py", f"http://{system.http}", KEY)
    expected = "".join(f"w{token_id}" for token_id in fake_answer([40, 41, 42], 8))
    assert answer["whole"] == answer["stream"] == expected
    assert answer["usage"] == 8
    assert answer["pieces"] > 1
    assert answer["text"] == "".join(f"w{token_id}" for token_id in fake_answer([40, 41], 8))
    assert answer["refused"] == "AuthenticationError"


async def test_a_grpc_client_that_asks_by_reflection_over_tls(python: Path, tmp_path: Path) -> None:
    key, certificate = openssl(tmp_path)
    flags = ("--ssl-keyfile", str(key), "--ssl-certfile", str(certificate), "--api-key", KEY)
    async with (
        scheduler(tmp_path, Script(ids=[*b"abcde"])) as (_, store),
        gateway(tmp_path, store, *flags) as running,
        httpx.AsyncClient(
            base_url=f"https://{running.info['http']}", verify=ssl.create_default_context(cafile=str(certificate))
        ) as http,
    ):
        await until_status(http, "/health/ready", 200)
        answer = await asyncio.to_thread(run, python, "with_grpc_requests.py", running.info["grpc"], certificate, KEY)
    assert "fastserve.v1.Inference" in answer["services"]
    assert answer["whole"] == answer["stream"] == "abcde"
    assert answer["usage"] == 5


def test_locust_finds_no_fault(python: Path, start: Start, tmp_path: Path) -> None:
    """Its report counts every request that failed, by its own judgement."""
    system = start(f"--api-key={KEY}")
    system.wait_ready()
    command = [str(python), "-m", "locust", "-f", str(HERE / "locustfile.py"), "--headless", "--users=20"]
    command += ["--spawn-rate=20", "--host", f"http://{system.http}", "--json", "--stop-timeout=100"]
    report = json.loads(execute(command, KEY=KEY, ENOUGH="20").stdout)
    assert {entry["name"] for entry in report} == {"/v1/chat/completions", "/v1/completions", "/v1/models"}
    assert all(entry["num_requests"] >= 20 for entry in report)
    assert sum(entry["num_failures"] for entry in report) == 0
