"""Where a job's KV is, and which moves between these places there are. Everything else is a defect."""

from collections.abc import Sequence
from enum import StrEnum

from fastserve_scheduler.core.history import Moment


class KvState(StrEnum):
    #: Nowhere: never computed, or given up.
    ABSENT = "absent"
    #: On the device; full blocks may have a copy on the host besides.
    DEVICE = "device"
    #: On its way to the host: no longer usable, its blocks not yet free.
    OUTGOING = "outgoing"
    #: On the host alone.
    HOST = "host"
    #: On its way back: blocks taken, not yet usable, the host copy still whole.
    INCOMING = "incoming"


_A, _D, _O, _H, _I = KvState

KV_MOVES: dict[tuple[KvState, KvState], str] = {
    (_A, _D): "its first blocks are taken for a prefill",
    (_D, _A): "evicted, lost, discarded or finished",
    (_D, _O): "swapped out",
    (_D, _H): "evicted or lost, and the host has a copy of its beginning",
    (_O, _H): "the copy has landed; or it is void, and the host has a copy of its beginning",
    (_O, _A): "the copy failed or is void, or the job is gone",
    (_H, _I): "swapped in",
    (_H, _A): "the host store fell, or the job is finished",
    (_I, _D): "the copy has landed",
    (_I, _H): "the stages fell, the host copy is whole",
    (_I, _A): "the copy failed, the host store fell, or the job is gone",
}
"""Every move there is, and what makes it. A job is in a batch from ABSENT or DEVICE only."""


class InvalidTransition(Exception):
    """KV was to be moved in a way that does not exist: a defect of the core, told with the job's story."""

    def __init__(self, job_id: int, before: KvState, after: KvState, story: Sequence[Moment]) -> None:
        self.job_id, self.before, self.after, self.story = job_id, before, after, tuple(story)
        told = "".join(f"\n{moment}" for moment in story)
        super().__init__(f"KV of job {job_id} cannot go from {before} to {after}{told}")
