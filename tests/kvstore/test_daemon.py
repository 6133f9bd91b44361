"""The daemon as a process: starts, is killed, leaves nothing behind, refuses what it cannot carry."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from fastserve.v1 import kvstore_pb2 as pb
from fastserve.v1 import kvstore_pb2_grpc
from fastserve_common.segments import PREFIX, SHM_DIR, attach
from fastserve_common.state import open_state

pytestmark = pytest.mark.cluster

MIB = 2**20

#: Runs a command without the capability to lock memory, under a limit of 64 KiB: `ulimit -l 64` as a plain user has it.
UNPRIVILEGED = """
import ctypes, os, resource, sys
CAP_IPC_LOCK, PR_CAPBSET_DROP = 14, 24
ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_IPC_LOCK, 0, 0, 0)
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
os.execv(sys.argv[1], sys.argv[1:])
"""

Daemon = subprocess.Popen[str]
Start = Callable[..., Daemon]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    running: list[Daemon] = []

    def run(*flags: str, wrapper: tuple[str, ...] = ()) -> Daemon:
        command = [*wrapper, sys.executable, "-m", "fastserve_kvstore", f"--state=sqlite://{tmp_path}/state.db"]
        command += ["--node=n", "--host-kv-memory=8MiB", *flags]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        running.append(process)
        return process

    yield run
    for process in running:
        process.kill()
        process.communicate()
    for process in running:
        for path in SHM_DIR.glob(f"{PREFIX}{process.pid}-*"):
            path.unlink()


def wait_ready(process: Daemon) -> str:
    """The lines up to the one that says ready."""
    lines = ""
    assert process.stderr is not None
    for line in process.stderr:
        lines += line
        if "kvstore: ready" in line:
            return lines
    raise AssertionError(f"it ended: {lines}")


def segments_of(process: Daemon) -> list[str]:
    return [path.name for path in SHM_DIR.glob(f"{PREFIX}{process.pid}-*")]


def member(tmp_path: Path) -> dict[str, str]:
    async def ask() -> dict[str, str]:
        state = open_state(f"sqlite://{tmp_path}/state.db")
        members = await state.members("kvstore")
        await state.close()
        return members["n"]

    return asyncio.run(ask())


def status(address: str) -> pb.GetStatusResponse:
    with grpc.insecure_channel(address) as channel:
        return kvstore_pb2_grpc.KvStoreStub(channel).GetStatus(pb.GetStatusRequest(), timeout=10)


def test_it_registers_serves_and_leaves_nothing(start: Start, tmp_path: Path) -> None:
    process = start()
    wait_ready(process)
    facts = member(tmp_path)
    assert segments_of(process) == [facts["segment"]]
    assert status(facts["address"]).arena_bytes == 8 * MIB
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    assert segments_of(process) == []


def test_kill_9_five_times_and_shared_memory_does_not_grow(start: Start, tmp_path: Path) -> None:
    generations: list[int] = []
    killed: list[Daemon] = []
    for _ in range(5):
        process = start()
        said = wait_ready(process)
        assert len(segments_of(process)) == 1, "one segment each"
        assert [segments_of(dead) for dead in killed] == [[]] * len(killed), "what the dead left is swept"
        assert said.count("left behind") == bool(killed)
        generations.append(status(member(tmp_path)["address"]).generation)
        process.kill()
        process.wait()
        killed.append(process)
    assert generations == sorted(set(generations)), "KV of an older start is never taken for this one's"
    process = start()
    wait_ready(process)
    process.terminate()
    process.wait(20)
    assert [segments_of(dead) for dead in [*killed, process]] == [[]] * 6


def test_a_worker_that_maps_a_killed_daemon_s_arena_goes_on(start: Start, tmp_path: Path) -> None:
    first = start()
    wait_ready(first)
    with attach(member(tmp_path)["segment"]) as memory:
        first.kill()
        first.wait()
        second = start()
        wait_ready(second)
        memory[:2] = b"ok"
        assert memory[:2] == b"ok"
        assert segments_of(first) == []


def test_two_daemons_on_one_machine_leave_each_other_alone(start: Start) -> None:
    first, second = start("--node=a"), start("--node=b")
    wait_ready(first)
    wait_ready(second)
    assert (len(segments_of(first)), len(segments_of(second))) == (1, 1)


def test_a_stream_in_progress_does_not_hold_the_end(start: Start, tmp_path: Path) -> None:
    process = start()
    wait_ready(process)
    with grpc.insecure_channel(member(tmp_path)["address"]) as channel:
        hello = pb.KvCommand(hello=pb.KvHello(scheduler_id="s", epoch=1))
        stop = iter([hello])
        events = kvstore_pb2_grpc.KvStoreStub(channel).Control(_then_wait(stop))
        assert next(events).HasField("ready")
        process.terminate()
        assert list(events) == []
        assert process.wait(20) == 0


def _then_wait(commands: Iterator[pb.KvCommand]) -> Iterator[pb.KvCommand]:
    yield from commands
    while True:
        time.sleep(0.05)  # an open stream with nothing to say
        yield pb.KvCommand()


def test_memory_that_may_not_be_locked_degrades_with_a_warning_or_is_refused(start: Start, tmp_path: Path) -> None:
    wrapper = (sys.executable, "-c", UNPRIVILEGED)
    process = start("--lock-memory=prefer", wrapper=wrapper)
    said = wait_ready(process)
    needed = 8 * MIB + 256 * 1024
    assert f"the limit is 64KiB, raise it to at least {needed} bytes (ulimit -l {needed // 1024})" in said
    assert "going on with pages that are not locked" in said
    assert not status(member(tmp_path)["address"]).page_locked
    refused = start("--lock-memory=require", wrapper=wrapper)
    assert refused.wait(20) == 2
    assert f"raise it to at least {needed} bytes" in (refused.stderr.read() if refused.stderr else "")
    assert segments_of(refused) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="a plain user may not lock memory")
def test_locked_pages_are_reported(start: Start, tmp_path: Path) -> None:
    process = start("--lock-memory=prefer")
    said = wait_ready(process)
    locked = int(re.findall(r"VmLck:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())[0])
    assert status(member(tmp_path)["address"]).page_locked == (locked >= 8 * 1024) == ("cannot lock" not in said)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--host-kv-memory=900TiB"], r"--host-kv-memory: /dev/shm has .* free .* set at most \d+"),
        (["--host-kv-memory=1"], r"--host-kv-memory: must be at least 4KiB"),
        (["--lock-memory=perhaps"], r"--lock-memory: .*'off', 'prefer' or 'require'"),
        (["--state=nowhere"], r"--state: expected sqlite"),
        (["--state=redis://127.0.0.1:1/0"], r"error: .*127.0.0.1:1"),
        (["--listen=127.0.0.1:99999"], r"error: cannot listen on 127.0.0.1:99999"),
        (["--metrics-listen=127.0.0.1:x"], r"--metrics-listen: cannot listen"),
        (["--lease-ttl-s=0"], r"--lease-ttl-s: .*greater than 0"),
    ],
)
def test_what_it_cannot_do_is_refused_in_one_sentence(start: Start, flags: list[str], sentence: str) -> None:
    process = start(*flags)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 2
    assert re.search(sentence, said), said
    assert "Traceback" not in said
    assert segments_of(process) == []


def test_help_lists_the_settings() -> None:
    command = [sys.executable, "-m", "fastserve_kvstore", "--help"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "--host-kv-memory" in said
    assert "(default: 1GiB)" in said
