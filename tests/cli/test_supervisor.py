"""The supervisor with toy children: what it does when they are slow, fail, die, or will not end."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from fastserve.cli import supervisor as supervisor_module
from fastserve.cli.child import describe_end
from fastserve.cli.reporter import Reporter
from fastserve.cli.specs import ChildSpec
from fastserve.cli.supervisor import (
    MAX_RESTART_BACKOFF_S,
    MAX_RESTARTS,
    RESTART_WINDOW_S,
    Restarts,
    StartError,
    StoppedError,
    Supervisor,
)
from fastserve_common.state import SqliteState

#: Registers and waits for SIGTERM; appends what it does to a common file.
TOY = """
import asyncio, sys
from fastserve_common.lifecycle import run_service
from fastserve_common.state import membership, open_state
name, url, story = sys.argv[1:4]
def tell(what):
    with open(story, "a") as file:
        file.write(f"{name} {what}\\n")
async def main(stop):
    state = open_state(url)
    async with membership(state, "toy", name, {"address": name}):
        tell("up")
        await stop.wait()
    await state.close()
    tell("down")
sys.exit(run_service(main))
"""
FAILS = "import sys; print('12:00:00 ERROR   toy: the model is broken'); sys.exit(3)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
)
WITH_GRANDCHILD = (
    "import subprocess, sys, time; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); time.sleep(600)"
)

Spec = Callable[..., ChildSpec]


class Quiet(Reporter):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def line(self, text: str, *, style: str = "") -> None:
        self.lines.append(text)


@pytest.fixture
async def state(tmp_path: Path) -> AsyncIterator[SqliteState]:
    store = SqliteState(tmp_path / "state.db")
    yield store
    await store.close()


@pytest.fixture
def reporter() -> Quiet:
    return Quiet()


@pytest.fixture
def stop() -> asyncio.Event:
    return asyncio.Event()


@pytest.fixture
async def supervisor(
    state: SqliteState, reporter: Quiet, stop: asyncio.Event, tmp_path: Path
) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(state, reporter, lambda name: tmp_path / f"{name}.log", "warning", stop)
    yield supervisor
    supervisor.kill_all()
    await supervisor.stop_all()


@pytest.fixture
def toy(tmp_path: Path) -> Spec:
    def make(name: str, stop_s: float = 20.0) -> ChildSpec:
        argv = (sys.executable, "-c", TOY, name, f"sqlite://{tmp_path}/state.db", str(tmp_path / "story"))
        return ChildSpec(name, "toy", name, argv, stop_s)

    return make


def script(name: str, code: str, stop_s: float = 20.0) -> ChildSpec:
    return ChildSpec(name, "toy", name, (sys.executable, "-c", code), stop_s)


def story(tmp_path: Path) -> list[str]:
    return (tmp_path / "story").read_text().splitlines()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - other processes announce nothing
            await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


async def test_groups_end_in_reverse_order(supervisor: Supervisor, toy: Spec, tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        supervisor.start(toy(name))
        assert await supervisor.until_registered(toy(name)) == [{"address": name}]
    await supervisor.stop_all()
    assert story(tmp_path) == ["a up", "b up", "c up", "c down", "b down", "a down"]


async def test_a_child_that_fails_to_start_fails_the_start_with_its_words(supervisor: Supervisor, toy: Spec) -> None:
    supervisor.start(toy("a"), script("b", FAILS))
    with pytest.raises(StartError, match="b ended with status 3 while starting") as error:
        await supervisor.until_registered(toy("a"), script("b", FAILS))
    assert "the model is broken" in str(error.value)


async def test_an_earlier_child_s_death_fails_the_start_too(supervisor: Supervisor, toy: Spec) -> None:
    supervisor.start(toy("a"))
    await supervisor.until_registered(toy("a"))
    supervisor.start(script("b", "import time; time.sleep(600)"))
    waiting = asyncio.create_task(supervisor.until_registered(script("b", "")))
    os.kill(supervisor.children[0][0].pid or 0, signal.SIGKILL)
    with pytest.raises(StartError, match="a was ended by SIGKILL, most likely for lack of memory while starting"):
        await waiting


async def test_told_to_stop_while_starting(supervisor: Supervisor, stop: asyncio.Event) -> None:
    supervisor.start(script("b", "import time; time.sleep(600)"))
    waiting = asyncio.create_task(supervisor.until_registered(script("b", "")))
    stop.set()
    with pytest.raises(StoppedError):
        await waiting


async def test_what_dies_is_started_again_until_told_to_stop(
    supervisor: Supervisor, toy: Spec, reporter: Quiet, stop: asyncio.Event, tmp_path: Path
) -> None:
    supervisor.start(toy("a"))
    await supervisor.until_registered(toy("a"))
    watching = asyncio.create_task(supervisor.watch())
    (child,) = supervisor.children[0]
    first = child.pid
    os.kill(first or 0, signal.SIGKILL)
    await until(lambda: story(tmp_path) == ["a up", "a up"])
    assert child.pid != first
    assert reporter.lines == ["a was ended by SIGKILL, most likely for lack of memory; starting it again"]
    stop.set()
    await watching
    await supervisor.stop_all()
    assert story(tmp_path) == ["a up", "a up", "a down"]


async def test_what_dies_too_often_is_given_up(supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "RESTART_BACKOFF_S", 0.01)
    supervisor.start(script("b", FAILS))
    with pytest.raises(
        StartError, match=f"b ended with status 3 after {MAX_RESTARTS} restarts within .* giving up"
    ) as error:
        await supervisor.watch()
    assert str(error.value).count("the model is broken") == MAX_RESTARTS + 1


async def test_what_will_not_end_is_killed_and_said(supervisor: Supervisor, reporter: Quiet, tmp_path: Path) -> None:
    supervisor.start(script("deaf", STUBBORN, stop_s=0.2))
    await until(lambda: "deaf" in (tmp_path / "deaf.log").read_text())
    (child,) = supervisor.children[0]
    await supervisor.stop_all()
    assert not child.running
    assert "deaf did not end in 0 s and was killed" in reporter.lines


async def test_killing_takes_what_a_child_started_along(supervisor: Supervisor, tmp_path: Path) -> None:
    supervisor.start(script("parent", WITH_GRANDCHILD))
    await until(lambda: (tmp_path / "parent.log").read_text().endswith("\n"))
    grandchild = int((tmp_path / "parent.log").read_text())
    begin_s = time.monotonic()
    supervisor.kill_all()
    assert time.monotonic() - begin_s < 10, "it waits for nothing"
    await until(lambda: not alive(grandchild))


async def test_a_process_that_ends_by_itself(supervisor: Supervisor, tmp_path: Path) -> None:
    code = "import sys; print('the result'); print('12:00:00 WARNING toy: a word', file=sys.stderr)"
    spec = ChildSpec("job", "", "", (sys.executable, "-c", code), 1.0, stdout_path=tmp_path / "result")
    await supervisor.run_to_end(spec)
    assert (tmp_path / "result").read_text() == "the result\n"
    with pytest.raises(StartError, match="job ended with status 3"):
        await supervisor.run_to_end(script("job", FAILS))


def test_restarts_back_off_and_are_bounded() -> None:
    restarts = Restarts()
    delays = [restarts.next_delay_s(0.0) for _ in range(MAX_RESTARTS + 1)]
    assert delays[0] == 0.0, "the first one comes at once"
    waits = [delay for delay in delays[1:] if delay is not None]
    assert waits == sorted(waits)
    assert all(0 < wait <= MAX_RESTART_BACKOFF_S for wait in waits)
    assert delays[-1] is None
    assert restarts.next_delay_s(RESTART_WINDOW_S) == 0.0, "an old death is forgotten"


@pytest.mark.parametrize(
    ("returncode", "words"),
    [
        (0, "ended with status 0"),
        (-15, "was ended by SIGTERM"),
        (-9, "was ended by SIGKILL, most likely for lack of memory"),
    ],
)
def test_how_it_ended(returncode: int, words: str) -> None:
    assert describe_end(returncode) == words
