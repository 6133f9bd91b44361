"""Shared memory with an owner: nothing of the living is touched, nothing of the dead stays."""

import contextlib
import errno
import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from fastserve_common.segments import PREFIX, SHM_DIR, OwnedSegment, attach, sweep

MAKE_AND_WAIT = """
import sys
from fastserve_common.segments import OwnedSegment
segment = OwnedSegment.create(65536)
segment.map()[:5] = b"hello"
print(segment.name, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other_process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that owns a segment with "hello" in it, and the segment's name."""
    command = [sys.executable, "-c", MAKE_AND_WAIT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        name = process.stdout.readline().strip()
        yield process, name
        process.kill()
    (SHM_DIR / name).unlink(missing_ok=True)


def test_two_processes_map_one_segment(other_process: tuple[subprocess.Popen[str], str]) -> None:
    _, name = other_process
    with attach(name) as memory:
        assert memory[:5] == b"hello"
        memory[:5] = b"world"
        with attach(name) as again:
            assert again[:5] == b"world"


def test_a_sweep_leaves_the_living_alone_and_removes_the_dead(other_process: tuple[subprocess.Popen[str], str]) -> None:
    process, name = other_process
    assert name not in sweep()
    assert (SHM_DIR / name).exists()
    process.kill()
    process.wait()
    sweep()
    assert not (SHM_DIR / name).exists()


def test_a_mapping_outlives_the_name(other_process: tuple[subprocess.Popen[str], str]) -> None:
    process, name = other_process
    with attach(name) as memory:
        process.kill()
        process.wait()
        sweep()
        assert memory[:5] == b"hello"


def test_the_name_says_who_made_it_and_unlink_may_be_repeated() -> None:
    segment = OwnedSegment.create(4096)
    try:
        assert re.fullmatch(rf"{PREFIX}{os.getpid()}-[0-9a-f]{{16}}", segment.name)
        assert (SHM_DIR / segment.name).stat().st_size == 4096
    finally:
        segment.unlink()
        segment.unlink()
    assert not (SHM_DIR / segment.name).exists()


def test_a_size_that_does_not_fit_leaves_nothing_behind() -> None:
    stats = os.statvfs(SHM_DIR)
    too_large = stats.f_bavail * stats.f_frsize + 2**30
    before = sorted(SHM_DIR.iterdir())
    with pytest.raises(OSError, match="No space left") as error:
        OwnedSegment.create(too_large)
    assert error.value.errno == errno.ENOSPC
    assert sorted(SHM_DIR.iterdir()) == before


@pytest.mark.parametrize("name", ["other", "fastserve-kv-../../etc/passwd"])
def test_only_segments_of_ours_are_attached(name: str) -> None:
    with pytest.raises(ValueError, match="not the name of a segment"):
        attach(name)


def test_segments_of_one_process_id_do_not_meet() -> None:
    """Two daemons that are process 1 of their containers."""
    first, second = OwnedSegment.create(4096), OwnedSegment.create(4096)
    try:
        assert first.name != second.name
        assert not {first.name, second.name} & set(sweep())
    finally:
        first.unlink()
        second.unlink()


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs namespaces of process ids")
def test_owners_in_other_namespaces_of_process_ids_are_told_dead_from_living() -> None:
    """Both are process 1 where they live; one ends, and its memory goes while the other's stays."""
    command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", MAKE_AND_WAIT]
    with contextlib.ExitStack() as stack:
        owners = [
            stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            for _ in range(2)
        ]
        for owner in owners:
            stack.callback(owner.kill)
        names = [owner.stdout.readline().strip() for owner in owners if owner.stdout is not None]
        if not all(names):
            pytest.skip("this system gives no namespaces of process ids")
        assert all(name.startswith(f"{PREFIX}1-") for name in names)
        owners[0].communicate()  # its input ends, and so does it
        sweep()
        assert [(SHM_DIR / name).exists() for name in names] == [False, True]
        owners[1].communicate()
        sweep()
        assert not (SHM_DIR / names[1]).exists()


def test_a_segment_swept_before_it_was_locked_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep may see the name before its maker has the lock."""
    swept: list[str] = []
    lock = fcntl.flock

    def sweep_first(fd: int, operation: int) -> None:
        if operation == fcntl.LOCK_EX and not swept:
            swept.extend(sweep())
        lock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", sweep_first)
    segment = OwnedSegment.create(4096)
    try:
        assert any(name.startswith(f"{PREFIX}{os.getpid()}-") for name in swept)
        assert segment.name not in swept
        assert (SHM_DIR / segment.name).stat().st_size == 4096
    finally:
        segment.unlink()
