"""Pure scheduling core: standard library only, no clock, no I/O, no randomness, no threads, no logging."""

from fastserve_scheduler.core.config import PRESETS, CoreConfig, MlfqConfig
from fastserve_scheduler.core.invariants import InvariantViolation
from fastserve_scheduler.core.profile import Profile
from fastserve_scheduler.core.scheduler import SchedulerCore
from fastserve_scheduler.core.snapshot import LevelCount, Snapshot

__all__ = [
    "PRESETS",
    "CoreConfig",
    "InvariantViolation",
    "LevelCount",
    "MlfqConfig",
    "Profile",
    "SchedulerCore",
    "Snapshot",
]
