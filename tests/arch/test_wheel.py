"""The wheel: everything in it, nothing else, and usable without torch."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from .repository import PACKAGES, ROOT

#: Imports from the unpacked wheel only, with torch refused; prints where each package came from.
IMPORT = """
import importlib, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ModuleNotFoundError(f"{name} is refused here")
sys.meta_path.insert(0, Refuse())
for name in sys.argv[1:]:
    print(importlib.import_module(name).__file__)
"""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*command, str(ROOT)], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "unpacked")
    return folder / "unpacked"


def test_it_holds_the_packages_and_nothing_else(unpacked: Path) -> None:
    found = {path.name for path in unpacked.iterdir()}
    assert found - {name for name in found if name.endswith(".dist-info")} == set(PACKAGES)
    assert (unpacked / "fastserve/v1/inference_pb2.py").is_file()
    assert all((unpacked / package / "py.typed").is_file() for package in PACKAGES)


def test_it_brings_the_command(unpacked: Path) -> None:
    (entry_points,) = unpacked.glob("*.dist-info/entry_points.txt")
    assert "fastserve = fastserve.cli:main" in entry_points.read_text()


def test_it_imports_from_the_wheel_without_torch(unpacked: Path) -> None:
    modules = ["fastserve", "fastserve.cli.serve", "fastserve_common.state"]
    modules += [f"fastserve_{name}.__main__" for name in ("gateway", "scheduler", "kvstore", "worker")]
    result = subprocess.run(
        [sys.executable, "-c", IMPORT, *modules],
        env={"PYTHONPATH": str(unpacked), "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert all(line.startswith(str(unpacked)) for line in result.stdout.splitlines()), result.stdout
