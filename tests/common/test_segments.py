"""Shared memory with an owner: nothing of the living is touched, nothing of the dead stays."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from fastserve_common import segments
from fastserve_common.segments import SHM_DIR, OwnedSegment, attach, process_start_ticks, sweep

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
    assert name not in sweep(process.pid)
    process.kill()
    process.wait()
    assert sweep(process.pid + 1) == []
    assert sweep(process.pid) == [name]
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
        assert segment.name == f"fastserve-kv-{os.getpid()}-{process_start_ticks(os.getpid())}"
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


def test_an_empty_segment_of_a_living_maker_is_being_made(monkeypatch: pytest.MonkeyPatch) -> None:
    pid = os.getpid()
    path = SHM_DIR / f"{segments.PREFIX}{pid}-{process_start_ticks(pid)}"
    path.touch()
    try:
        assert path.name not in sweep()
        stale = path.with_name(f"{segments.PREFIX}{pid}-1")  # the same id, another process
        path.rename(stale)
        assert stale.name in sweep()
    finally:
        path.unlink(missing_ok=True)


def test_asking_for_a_process_that_is_not_there() -> None:
    with pytest.raises(ProcessLookupError):
        process_start_ticks(2**22 + 1)
