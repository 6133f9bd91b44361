"""Real processes and real signals: how a service ends, and that it never outlives its supervisor."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fastserve_common.lifecycle import EXIT_FORCED, SUPERVISOR_PID_ENV

SERVICE = """
import asyncio, sys
from fastserve_common.lifecycle import run_service
async def main(stop):
    print("ready", flush=True)
    await stop.wait()
    print("stopping", flush=True)
    if "stuck" in sys.argv:
        await asyncio.Event().wait()
    return 7 if "seven" in sys.argv else None
sys.exit(run_service(main, on_force=lambda: print("forced", flush=True)))
"""

#: Starts the service above as a child tied to itself, prints the child's pid, then waits.
SUPERVISOR = """
import os, subprocess, sys
env = dict(os.environ, FASTSERVE_SUPERVISOR_PID=str(os.getpid()))
child = subprocess.Popen([sys.executable, *sys.argv[1:]], env=env, stdout=subprocess.PIPE, start_new_session=True)
print(child.pid, child.stdout.readline().decode().strip() if "--await" in sys.argv else "", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def start() -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    processes: list[subprocess.Popen[str]] = []

    def run(*argv: str) -> "subprocess.Popen[str]":
        environment = {k: v for k, v in os.environ.items() if k != SUPERVISOR_PID_ENV}
        process = subprocess.Popen(
            [sys.executable, *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        processes.append(process)
        return process

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def wait_gone(pid: int) -> None:
    deadline = time.monotonic() + 20
    while alive(pid):
        assert time.monotonic() < deadline, f"{pid} outlives its supervisor"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_asks_for_the_orderly_end(
    start: Callable[..., "subprocess.Popen[str]"], signum: signal.Signals
) -> None:
    process = start("-c", SERVICE)
    assert line(process) == "ready"
    process.send_signal(signum)
    assert line(process) == "stopping"
    assert process.wait(20) == 0


def test_the_value_of_main_is_the_exit_status(start: Callable[..., "subprocess.Popen[str]"]) -> None:
    process = start("-c", SERVICE, "seven")
    assert line(process) == "ready"
    process.terminate()
    assert process.wait(20) == 7


def test_a_second_signal_ends_it_at_once(start: Callable[..., "subprocess.Popen[str]"]) -> None:
    process = start("-c", SERVICE, "stuck")
    assert line(process) == "ready"
    process.send_signal(signal.SIGINT)
    assert line(process) == "stopping"
    process.send_signal(signal.SIGINT)
    assert line(process) == "forced"
    assert process.wait(20) == EXIT_FORCED


@pytest.mark.parametrize("how", ["orderly", "stuck"])
def test_a_child_ends_with_its_killed_supervisor(start: Callable[..., "subprocess.Popen[str]"], how: str) -> None:
    supervisor = start("-c", SUPERVISOR, "-c", SERVICE, how, "--await")
    pid, said = line(supervisor).split()
    assert said == "ready"
    supervisor.kill()
    wait_gone(int(pid))


def test_a_child_that_is_still_importing_ends_too(
    start: Callable[..., "subprocess.Popen[str]"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "importing"
    (tmp_path / "slow_module.py").write_text(
        f"import pathlib, time\npathlib.Path({str(marker)!r}).touch()\ntime.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    supervisor = start("-c", SUPERVISOR, "-m", "fastserve_common.supervised", "slow_module")
    pid = int(line(supervisor))
    deadline = time.monotonic() + 20
    while not marker.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    supervisor.kill()
    wait_gone(pid)


def test_a_child_started_by_a_dead_supervisor_ends_at_once(
    start: Callable[..., "subprocess.Popen[str]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = f"import os, sys; os.environ[{SUPERVISOR_PID_ENV!r}] = '1'; exec(sys.argv[1])"
    process = start("-c", launcher, SERVICE)
    assert process.wait(20) == 0
    assert "stopping" in (process.stdout.read() if process.stdout else "")


def test_supervised_hands_arguments_and_status_on(
    start: Callable[..., "subprocess.Popen[str]"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "echo_module.py").write_text("import sys\nprint(sys.argv[1:], __name__, flush=True)\nsys.exit(3)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process = start("-m", "fastserve_common.supervised", "echo_module", "--flag=x", "y")
    assert line(process) == "['--flag=x', 'y'] __main__"
    assert process.wait(20) == 3
