"""What happened to each job lately: a bounded ring, so that "why did my request wait" has an answer."""

from collections import deque
from dataclasses import dataclass
from enum import StrEnum

RING_MOMENTS = 65_536


class Happening(StrEnum):
    ARRIVED = "arrived, joined level"
    PREFILL = "prefill in iteration"
    RAN = "ran, generated tokens now"
    DEMOTED = "demoted to level"
    PROMOTED = "starved, promoted to level"
    TICKET = "starved, holds a ticket at level"
    EVICTED = "lost its KV to job"
    SWAP_OUT = "goes to the host, swap"
    SWAP_IN = "comes from the host, swap"
    SWAPPED = "swap has landed"
    SWAP_FAILED = "swap failed, KV is dropped"
    LOST_HOST = "lost its host copy, tokens"
    DISCARDED = "first iteration overran and was thrown away at level"
    LOST_STAGE = "lost its KV with a stage, epoch now"
    SHORTENED = "pool shrank, output limit now"
    REQUEUED = "queued anew by another policy, at level"
    ABORT_ASKED = "abort asked while in iteration"
    FINISHED = "finished with output tokens"


@dataclass(frozen=True, slots=True)
class Moment:
    now_ns: int
    job_id: int
    happening: Happening
    detail: int

    def __str__(self) -> str:
        return f"{self.now_ns} ns: {self.happening} {self.detail}"


class History:
    def __init__(self, num_moments: int = RING_MOMENTS) -> None:
        #: Of plain values, so that a checkpoint writes them down in one go.
        self._ring: deque[tuple[int, int, str, int]] = deque(maxlen=num_moments)

    def record(self, now_ns: int, job_id: int, happening: Happening, detail: int) -> None:
        self._ring.append((now_ns, job_id, happening._value_, detail))

    def of(self, job_id: int) -> tuple[Moment, ...]:
        """The job's moments still in the ring, oldest first."""
        return tuple(
            Moment(now_ns, job_id, Happening(happening), detail)
            for now_ns, whose, happening, detail in self._ring
            if whose == job_id
        )
