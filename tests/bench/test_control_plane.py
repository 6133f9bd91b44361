"""The control-plane benchmark runs, and what it says adds up."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "control_plane.py"


@pytest.mark.cluster
@pytest.mark.model
def test_the_quick_run_tells_the_time_beside_computing() -> None:
    command = (sys.executable, str(BENCHMARK), "--quick")
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"control plane, batch 16, (.*): (\S+) ms .* beside (\S+) of .*\((\d+) iterations", done.stdout)
    assert [how for how, *_ in lines] == ["answers sent whole", "every token streamed to its client"]
    assert all(float(control_ms) > 0 < float(compute_ms) for _, control_ms, compute_ms, _ in lines)
    assert all(int(count) >= 8 for *_, count in lines)
