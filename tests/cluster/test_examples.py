"""The examples of the documentation, run as a reader would run them."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .system import PATIENCE_S, System

pytestmark = pytest.mark.cluster

Start = Callable[..., System]
EXAMPLES = Path(__file__).parents[2] / "docs/examples"


def test_every_example_runs(start: Start) -> None:
    system = start()
    system.wait_ready()
    arguments = {
        "stream.py": [system.grpc],
        "many.py": [system.grpc],
        "resume.py": [system.grpc],
        "openai_client.py": [f"http://{system.http}/v1"],
    }
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(arguments)
    for name, given in arguments.items():
        command = [sys.executable, "-W", "error", str(EXAMPLES / name), *given]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert done.returncode == 0, f"{name}: {done.stderr}"
        assert done.stderr == ""
        assert "w" in done.stdout, f"{name} says words of the fake model: {done.stdout!r}"
    assert system.stop() == 0
