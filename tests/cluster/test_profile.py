"""`fastserve profile`: measures, prints, keeps; and `serve` uses what it kept."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster


def profile(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fastserve.cli", "profile", *args]
    environment = {**os.environ, "TMPDIR": str(folder)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=110)


def test_it_prints_a_table_and_keeps_a_file(words: Path, tmp_path: Path) -> None:
    kept = tmp_path / "profiles"
    result = profile(tmp_path, str(words), "--fake", f"--profile-dir={kept}", "--kv-memory=64MiB")
    assert result.returncode == 0, result.stderr
    assert "prefill tokens" in result.stdout
    assert "decode sequences" in result.stdout
    (path,) = kept.glob("*.json")
    assert result.stdout.splitlines()[-1] == str(path)
    assert json.loads(path.read_text())["profile"]["prefill"]
    assert list(tmp_path.glob("fastserve-*")) == []


def test_what_cannot_be_measured_is_said(words: Path, tmp_path: Path) -> None:
    result = profile(tmp_path, str(words), "--fake", "--kv-memory=1MiB", "--max-model-len=100000")
    assert result.returncode == 1
    assert "less than one sequence of 100000" in result.stderr
    assert profile(tmp_path, "/nowhere").returncode == 2
    assert list(tmp_path.glob("fastserve-*")) == []
