"""How long KV stays where it is: a job's as a whole, told when it moves.

The nearest that there is to the lives of blocks that others sample: here blocks are no cache, they come and go with
their job.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from fastserve_scheduler.core.job import Job
from fastserve_scheduler.core.kv_state import KvState
from fastserve_scheduler.core.tally import Tally, TallySnapshot, in_ns

STAY_BOUNDS_NS = in_ns(
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800
)  # fmt: skip


class StayEnd(StrEnum):
    """Why KV is not there any more."""

    #: From the device to the host, or left with what the host had of it already; from the host, on its way back.
    MOVED = "moved"
    #: Given up or lost: computed again.
    DROPPED = "dropped"
    #: The request ended.
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class ResidencySnapshot:
    device: Mapping[StayEnd, TallySnapshot]
    host: Mapping[StayEnd, TallySnapshot]
    idle_before_evict: TallySnapshot
    reuse_gap: TallySnapshot


def _stays() -> dict[StayEnd, Tally]:
    return {end: Tally(STAY_BOUNDS_NS) for end in StayEnd}


class Residency:
    """`device`, `host`: stays by how they ended. `idle_before_evict`: how long KV had not been used when the device
    gave it up for others. `reuse_gap`: from its last use before it went to the host to its next one."""

    def __init__(self) -> None:
        self.device, self.host = _stays(), _stays()
        self.idle_before_evict = Tally(STAY_BOUNDS_NS)
        self.reuse_gap = Tally(STAY_BOUNDS_NS)

    def moves(self, job: Job, after: KvState, now_ns: int) -> None:
        """The job's KV is about to be elsewhere. A swap is no stay: neither on its way out nor on its way in."""
        stayed_ns = now_ns - job.kv_since_ns
        match job.kv:
            case KvState.DEVICE:
                end = _end(job, after)
                self.device[end].observe(stayed_ns)
                if end is not StayEnd.FINISHED:
                    self.idle_before_evict.observe(min(stayed_ns, now_ns - job.ran_ns))
            case KvState.HOST:
                self.host[_end(job, after)].observe(stayed_ns)
            case _:
                pass
        job.kv_since_ns = now_ns

    def returned(self, job: Job, now_ns: int) -> None:
        """The job runs for the first time since its KV came back."""
        self.reuse_gap.observe(now_ns - job.ran_ns)

    def snapshot(self) -> ResidencySnapshot:
        return ResidencySnapshot(
            {end: tally.snapshot() for end, tally in self.device.items()},
            {end: tally.snapshot() for end, tally in self.host.items()},
            self.idle_before_evict.snapshot(),
            self.reuse_gap.snapshot(),
        )


def _end(job: Job, after: KvState) -> StayEnd:
    if after is not KvState.ABSENT:
        return StayEnd.MOVED
    return StayEnd.FINISHED if job.aborted else StayEnd.DROPPED
