"""The node's memory for swapped KV: one POSIX shared memory segment, taken whole at start and removed at exit.

What cannot be carried is refused before anything is allocated, with the number to set. Locking pages is a service to
devices that copy from pinned memory: where the system does not allow it, the arena works without.
"""

import ctypes
import logging
import mmap
import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fastserve_common import segments
from fastserve_common.segments import SHM_DIR, OwnedSegment
from fastserve_common.settings import SettingsError
from fastserve_common.units import KIB, format_bytes
from fastserve_kvstore.slabs import ALIGNMENT_SLACK_BYTES

log = logging.getLogger(__name__)

LockMemory = Literal["off", "prefer", "require"]

#: Left to the rest of the machine when the arena is sized against free memory.
_MEMORY_RESERVE_BYTES = 64 * 1024 * KIB


@dataclass(slots=True)
class Arena:
    """`kv_bytes` for slots, plus what aligning the slabs may cost."""

    segment: OwnedSegment
    memory: mmap.mmap
    kv_bytes: int
    page_locked: bool

    @classmethod
    def open(cls, kv_bytes: int, lock_memory: LockMemory = "off") -> "Arena":
        """Sweep what dead owners left, check that the size can be carried, take it.

        Raises SettingsError with the number to set.
        """
        for name in segments.sweep():
            log.warning("removed shared memory that a process left behind: %s", name)
        size_bytes = kv_bytes + ALIGNMENT_SLACK_BYTES
        _require_space(size_bytes)
        try:
            segment = OwnedSegment.create(size_bytes)
        except OSError as error:
            raise SettingsError(
                f"--host-kv-memory: cannot take {format_bytes(size_bytes)} of shared memory: {error.strerror}"
            ) from error
        memory = segment.map()
        locked = False
        try:
            locked = _lock(memory, lock_memory)
        finally:
            if lock_memory == "require" and not locked:
                memory.close()
                segment.unlink()
        return cls(segment, memory, kv_bytes, locked)

    @property
    def name(self) -> str:
        return self.segment.name

    def close(self) -> None:
        """Unlink. Workers that map the memory keep their mapping."""
        self.memory.close()
        self.segment.unlink()


def _require_space(size_bytes: int) -> None:
    if not SHM_DIR.is_dir():
        raise SettingsError(f"--host-kv-memory: this system has no {SHM_DIR}, which holds the arena")
    stats = os.statvfs(SHM_DIR)
    free_bytes = stats.f_bavail * stats.f_frsize
    if size_bytes > free_bytes:
        raise SettingsError(
            f"--host-kv-memory: {SHM_DIR} has {format_bytes(free_bytes)} free of the {format_bytes(size_bytes)} "
            f"needed; set at most {max(0, free_bytes - ALIGNMENT_SLACK_BYTES)}, or give it more "
            f"(docker run --shm-size, or mount -o remount,size=... {SHM_DIR})"
        )
    available_bytes = _available_memory_bytes()
    if size_bytes + _MEMORY_RESERVE_BYTES > available_bytes:
        most = max(0, available_bytes - _MEMORY_RESERVE_BYTES - ALIGNMENT_SLACK_BYTES)
        raise SettingsError(
            f"--host-kv-memory: {format_bytes(available_bytes)} of memory are available and the arena needs "
            f"{format_bytes(size_bytes)}; set at most {most}"
        )


def _available_memory_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * KIB
    raise SettingsError("--host-kv-memory: the system does not say how much memory is available")


def _lock(memory: mmap.mmap, lock_memory: LockMemory) -> bool:
    """Whether the pages are locked. Raises SettingsError when they must be and cannot."""
    if lock_memory == "off":
        return False
    view = ctypes.c_char.from_buffer(memory)
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.mlock(ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(len(memory)))
    error = ctypes.get_errno()
    del view  # the mapping cannot be closed while it is borrowed
    if not failed:
        return True
    limit_bytes = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    limit = "unlimited" if limit_bytes == resource.RLIM_INFINITY else format_bytes(limit_bytes)
    sentence = (
        f"--lock-memory: cannot lock {format_bytes(len(memory))} of memory ({os.strerror(error)}); the limit is "
        f"{limit}, raise it to at least {len(memory)} bytes (ulimit -l {-(-len(memory) // KIB)})"
    )
    if lock_memory == "require":
        raise SettingsError(sentence)
    log.warning("%s; going on with pages that are not locked", sentence)
    return False
