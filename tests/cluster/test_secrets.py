"""Keys and passwords stay out of logs and command lines; request ids are in every line about a request."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest
from tests.gateway.models import write_model

from .system import System, command_line, wait_until

pytestmark = pytest.mark.cluster

Start = Callable[..., System]
FILE_KEY, FLAG_KEY, PASSWORD = "fsk-of-a-file-0123456789", "fsk-of-a-flag-0123456789", "pass-of-redis-0123456789"


def log_lines(system: System, service: str) -> list[dict[str, object]]:
    (path,) = system.folder.glob(f"fastserve-*/logs/{service}.log")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_keys_are_nowhere_and_request_ids_in_every_line_about_a_request(start: Start, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(FILE_KEY)
    keys.chmod(0o600)
    config = tmp_path / "config.toml"
    config.write_text(f'api-key = ["{FLAG_KEY}"]\n')
    config.chmod(0o600)
    system = start(f"--api-key-file={keys}", f"--config={config}", "--log-level=debug", "--log-format=json")
    system.wait_ready()
    with httpx.Client(base_url=f"http://{system.http}", timeout=60) as http:
        body = {"prompt": "w40 w41", "max_tokens": 4}
        for key in (FILE_KEY, FLAG_KEY):
            headers = {"authorization": f"Bearer {key}", "x-request-id": f"asked-with-{key[9:13]}"}
            assert http.post("/v1/completions", json=body, headers=headers).status_code == 200
        assert (
            http.post("/v1/completions", json=body, headers={"authorization": "Bearer " + "wrong"}).status_code == 401
        )

    def ends(service: str) -> list[dict[str, object]]:
        return [line for line in log_lines(system, service) if str(line["message"]).startswith("a request ends")]

    def both_ended(service: str) -> bool:
        return len(ends(service)) == 2

    for service in ("gateway", "scheduler"):
        wait_until(functools.partial(both_ended, service), f"{service} logs both ends", system)
        about = [line for line in log_lines(system, service) if "request" in str(line["message"])]
        assert len(about) >= 4
        assert {line.get("request_id") for line in about} == {"asked-with-file", "asked-with-flag"}
    for process in [psutil.Process(system.process.pid), *system.living()]:
        line = " ".join(command_line(process))
        assert FILE_KEY not in line
        assert FLAG_KEY not in line
    files = [path for path in system.folder.rglob("*") if path.is_file()]
    assert len([path for path in files if path.suffix == ".log"]) >= 5
    said = system.said.encode() + b"".join(path.read_bytes() for path in files)
    assert FILE_KEY.encode() not in said
    assert FLAG_KEY.encode() not in said
    assert system.stop() == 0


@pytest.mark.parametrize("module", ["gateway", "scheduler", "kvstore"])
def test_the_password_of_a_redis_that_is_not_there_is_not_said(module: str, tmp_path: Path) -> None:
    """The URL comes by the environment, so that no command line has it; complaints about it do not repeat it."""
    flags = {
        "gateway": [f"--model-dir={write_model(tmp_path / 'model')}", "--port=0"],
        "scheduler": ["--num-stages=1"],
        "kvstore": ["--host-kv-memory=1MiB"],
    }[module]
    environment = {"FASTSERVE_STATE": f"redis://:{PASSWORD}@127.0.0.1:1/0", "FASTSERVE_LOG_LEVEL": "debug"}
    with subprocess.Popen(
        [sys.executable, "-m", f"fastserve_{module}", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment},
    ) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        process.terminate()
        said = first + process.stdout.read()
    assert said.strip(), "it complained"
    assert PASSWORD not in said
