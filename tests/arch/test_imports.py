"""Who may import whom, and that only the worker needs torch."""

import pkgutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from .repository import PACKAGES, ROOT

#: Run in a process of its own: refuses torch and transformers, then imports everything that is named.
WITHOUT_TORCH = """
import importlib, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ModuleNotFoundError(f"{name} is refused here")
sys.meta_path.insert(0, Refuse())
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def modules_of(package: str) -> list[str]:
    spec = find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations
    found = pkgutil.walk_packages(spec.submodule_search_locations, package + ".", onerror=None)
    return [package, *(module.name for module in found if not module.name.endswith("__main__"))]


def test_the_import_rules_hold() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("package", [package for package in PACKAGES if package != "fastserve_worker"])
def test_everything_but_the_worker_imports_without_torch(package: str) -> None:
    modules = [name for name in modules_of(package) if name != "fastserve_common.supervised"]
    command = [sys.executable, "-c", WITHOUT_TORCH, *modules]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("module", ["__main__", "service", "fake_stage", "settings", "worker"])
def test_a_fake_stage_runs_without_torch(module: str) -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH, f"fastserve_worker.{module}"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("service", ["gateway", "scheduler", "worker", "kvstore"])
def test_every_service_explains_itself(service: str) -> None:
    command = [sys.executable, "-m", f"fastserve_{service}", "--help"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for flag in ("--state", "--log-level", "--config"):
        assert flag in result.stdout


@pytest.mark.parametrize("service", ["gateway", "scheduler", "worker", "kvstore"])
def test_every_service_refuses_a_wrong_flag_in_one_sentence(service: str) -> None:
    command = [sys.executable, "-m", f"fastserve_{service}", "--no-such-flag=1"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert "--no-such-flag" in result.stderr
    assert result.stderr.count("\n") == 1
