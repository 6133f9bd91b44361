"""POSIX shared memory segments with an owner: who made one, whether they live, and how what they left is removed.

Whether the owner lives is decided by a file lock, which the kernel drops with the last of the owner: process ids
repeat, and two containers may share one /dev/shm without sharing process ids. In each of them the owner may be process
1, so a segment's name carries the maker's process id for people, and random digits that tell it from every other.
"""

import contextlib
import fcntl
import mmap
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SHM_DIR = Path("/dev/shm")
PREFIX = "fastserve-kv-"


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
        name, fd = _make_locked()
        try:
            os.posix_fallocate(fd, 0, size_bytes)
        except OSError:
            (SHM_DIR / name).unlink(missing_ok=True)
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


def sweep() -> list[str]:
    """Unlink the segments whose owner is dead. Returns their names."""
    return [path.name for path in sorted(SHM_DIR.glob(PREFIX + "*")) if _unlink_if_dead(path)]


def _make_locked() -> tuple[str, int]:
    """Name and descriptor of an empty segment that no sweep removes."""
    while True:
        name = f"{PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        fd = os.open(SHM_DIR / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)  # waits only for a sweep that is looking at it
        if os.fstat(fd).st_nlink:
            return name, fd
        os.close(fd)  # that sweep was faster and took it for a dead owner's


def _unlink_if_dead(path: Path) -> bool:
    with _opened(path) as fd:
        if fd is None:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
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
