"""POSIX shared memory segments with an owner: who made one, whether they live, and how what they left is removed.

A segment's name carries its maker's process id and start time, for people and for a supervisor that has to clean up
after a killed child. Whether the owner lives is decided by a file lock, which the kernel drops with the last of the
owner: process ids repeat, and two containers may share one /dev/shm without sharing process ids.
"""

import contextlib
import fcntl
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SHM_DIR = Path("/dev/shm")
PREFIX = "fastserve-kv-"


def process_start_ticks(pid: int) -> int:
    """When `pid` started, in clock ticks since boot. Raises ProcessLookupError when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError as error:
        raise ProcessLookupError(pid) from error
    # The command's name stands in parentheses and may hold anything; fields are counted after the last one.
    return int(stat.rpartition(")")[2].split()[19])


@dataclass(slots=True)
class OwnedSegment:
    """A segment of this process: made, locked, and unlinked by it."""

    name: str
    size_bytes: int
    fd: int

    @classmethod
    def create(cls, size_bytes: int) -> "OwnedSegment":
        """The memory is taken from the system now, so that no later write can fail for lack of it.

        Raises OSError (ENOSPC) when /dev/shm cannot hold it; nothing is left behind then.
        """
        pid = os.getpid()
        name = f"{PREFIX}{pid}-{process_start_ticks(pid)}"
        path = SHM_DIR / name
        with contextlib.suppress(FileNotFoundError):
            path.unlink()  # an earlier segment of this very process
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)  # waits only for a sweep that is looking at it
            os.posix_fallocate(fd, 0, size_bytes)
        except OSError:
            path.unlink(missing_ok=True)
            os.close(fd)
            raise
        return cls(name, size_bytes, fd)

    def map(self) -> mmap.mmap:
        return mmap.mmap(self.fd, self.size_bytes)

    def unlink(self) -> None:
        """The name goes; processes that still map the memory keep it until they unmap. Harmless when repeated."""
        (SHM_DIR / self.name).unlink(missing_ok=True)
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def attach(name: str) -> mmap.mmap:
    """Map another process's segment, whole, for reading and writing. Raises OSError when it is gone."""
    if not name.startswith(PREFIX) or "/" in name:
        raise ValueError(f"{name!r} is not the name of a segment of ours")
    fd = os.open(SHM_DIR / name, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)


def sweep(pid: int | None = None) -> list[str]:
    """Unlink the segments whose owner is dead; with `pid`, only those that this process made. Returns their names."""
    prefix = PREFIX if pid is None else f"{PREFIX}{pid}-"
    return [path.name for path in sorted(SHM_DIR.glob(prefix + "*")) if _unlink_if_dead(path)]


def _unlink_if_dead(path: Path) -> bool:
    with _opened(path) as fd:
        if fd is None:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if os.fstat(fd).st_size == 0 and _maker_lives(path.name):
            return False  # made a moment ago and not locked yet
        path.unlink(missing_ok=True)
        return True


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int | None]:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # gone meanwhile, or another user's
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


def _maker_lives(name: str) -> bool:
    pid, _, start_ticks = name.removeprefix(PREFIX).partition("-")
    try:
        return process_start_ticks(int(pid)) == int(start_ticks)
    except (ValueError, ProcessLookupError):
        return False
