"""The core can be compiled to C, and then says the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILDER = ROOT / "services" / "scheduler" / "compile.py"
FRONT_END = "import sys; from mypyc.build import mypycify; mypycify(['--strict', *sys.argv[1:]])"


def modules() -> list[str]:
    listing = "import compile, pathlib; print(*compile.modules(compile.SOURCE))"
    done = subprocess.run(
        [sys.executable, "-c", listing], cwd=BUILDER.parent, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_all_of_the_core_is_compiled_and_the_simulator_with_it() -> None:
    found = modules()
    assert {"core/scheduler.py", "core/policies/predicted.py", "core/kv/proactive.py", "sim/fleet.py"} <= {
        name.removeprefix("fastserve_scheduler/") for name in found
    }
    assert not [name for name in found if "__init__" in name]


def test_the_compilers_front_end_takes_every_module(tmp_path: Path) -> None:
    """All but gcc: what mypyc cannot translate it says here."""
    (tmp_path / "fastserve_scheduler").symlink_to(BUILDER.parent / "fastserve_scheduler")
    command = [sys.executable, "-c", FRONT_END, *modules()]
    environment = {name: value for name, value in os.environ.items() if name != "MYPYPATH"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert list((tmp_path / "build").glob("*.c"))


def test_without_a_compiler_it_says_what_to_install(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, BUILDER, tmp_path / "out"], env={"PATH": ""}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr == "no C compiler: install gcc\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.full
@pytest.mark.timeout(1200)  # gcc takes a minute and a half on an idle machine
def test_a_compiled_core_gives_the_same_bytes(tmp_path: Path) -> None:
    """Every policy, with KV that does not fit, twice: once as Python and once as C."""
    compiled = tmp_path / "compiled"
    subprocess.run([sys.executable, BUILDER, compiled, "--optimise", "0"], check=True)
    flags = ["--model=opt-13b", "--device=a100-40", "--kv-tokens=3000", "--num-requests=60", "--rate=4", "--seed=3"]
    policies = "--compare=fcfs,skip-join-mlfq,predicted,slack,las,srpt"
    found = []
    for path, is_compiled in ((None, False), (compiled, True)):
        environment = {**os.environ, "PYTHONPATH": str(path)} if path else dict(os.environ)
        says = "import fastserve_scheduler.compiled as found; print(found.COMPILED)"
        told = subprocess.run([sys.executable, "-c", says], env=environment, capture_output=True, text=True, check=True)
        assert told.stdout.strip() == str(is_compiled)
        out = tmp_path / f"{is_compiled}.json"
        command = [sys.executable, "-m", "fastserve_scheduler.simulate", *flags, policies, f"--output={out}"]
        subprocess.run(command, env=environment, check=True, capture_output=True)
        found.append(json.loads(out.read_text()))
    assert found[0] == found[1]
