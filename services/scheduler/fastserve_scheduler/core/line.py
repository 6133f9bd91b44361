"""The jobs that wait for their next turn, in order, apart by where their KV is.

Jobs in flight keep their level and account but are not in line. A job's rank, KV state and deadline may change only
while it is out of line.
"""

from fastserve_scheduler.core.deadlines import DeadlineIndex
from fastserve_scheduler.core.job import Job, Rank
from fastserve_scheduler.core.kv_state import KvState
from fastserve_scheduler.core.policies.order import Order
from fastserve_scheduler.core.ranked import RankedJobs


class Line:
    def __init__(self, order: Order, deadlines: DeadlineIndex | None = None) -> None:
        self._order, self._deadlines = order, deadlines
        #: Resident and idle: can run, and can give way.
        self.ready = RankedJobs()
        #: No KV: a new job, or one that lost it.
        self.absent = RankedJobs()
        #: KV on the host.
        self.hosted = RankedJobs()
        #: KV on its way in or out.
        self.moving = RankedJobs()
        self._shelves = {
            KvState.DEVICE: self.ready,
            KvState.ABSENT: self.absent,
            KvState.HOST: self.hosted,
            KvState.OUTGOING: self.moving,
            KvState.INCOMING: self.moving,
        }
        #: How many of `ready` owe one decode token only.
        self.num_decodes = 0

    def put(self, job: Job) -> None:
        job.rank = self._order.rank(job)
        shelf = self._shelves[job.kv]
        shelf.add(job)
        if shelf is self.ready:
            self.num_decodes += job.is_decode
        if self._deadlines is not None:
            self._deadlines.add(job)

    def take(self, job: Job) -> None:
        shelf = self._shelves[job.kv]
        shelf.remove(job)
        if shelf is self.ready:
            self.num_decodes -= job.is_decode
        if self._deadlines is not None:
            self._deadlines.remove(job)

    def next(self, cursor: Rank, *, absent_too: bool, away_too: bool = False) -> Job | None:
        """The first job behind `cursor`. `away`: those on the host or on their way."""
        first = self.ready.after(cursor)
        if absent_too:
            first = _earlier(first, self.absent.after(cursor))
        if away_too:
            first = _earlier(first, self.hosted.after(cursor))
            first = _earlier(first, self.moving.after(cursor))
        return first

    def jobs(self) -> tuple[Job, ...]:
        return (*self.ready, *self.absent, *self.hosted, *self.moving)


def _earlier(one: Job | None, other: Job | None) -> Job | None:
    if one is None or (other is not None and other.rank < one.rank):
        return other
    return one
