"""The reference is made of docstrings, without a warning, and has everything that is exported."""

import subprocess
import sys
from pathlib import Path

import fastserve


def test_the_reference_is_whole(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-m", "pdoc", "fastserve", "!fastserve.v1", "-o", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "Warn" not in done.stderr, done.stderr
    page = (tmp_path / "fastserve.html").read_text()
    for name in fastserve.__all__:
        assert f'id="{name}"' in page, name
        exported = getattr(fastserve, name)
        assert exported.__doc__ or not isinstance(exported, type), f"{name} is not described"
