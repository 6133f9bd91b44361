"""The jobs that wait for their next turn, in order: those with KV on the device and those without, walked apart.

Jobs in flight keep their level and account but are not in line. A job's rank and residence may change only while it is
out of line.
"""

from fastserve_scheduler.core.job import Job, Rank
from fastserve_scheduler.core.policies.order import Order
from fastserve_scheduler.core.ranked import RankedJobs


class Line:
    def __init__(self, order: Order) -> None:
        self._order = order
        #: Resident and idle: can run, and can be evicted.
        self.ready = RankedJobs()
        #: No KV: a new job, or one that lost it.
        self.absent = RankedJobs()
        #: How many of `ready` owe one decode token only.
        self.num_decodes = 0

    def put(self, job: Job) -> None:
        job.rank = self._order.rank(job)
        if job.resident:
            self.ready.add(job)
            self.num_decodes += job.is_decode
        else:
            self.absent.add(job)

    def take(self, job: Job) -> None:
        if job.resident:
            self.ready.remove(job)
            self.num_decodes -= job.is_decode
        else:
            self.absent.remove(job)

    def next(self, cursor: Rank, *, absent_too: bool) -> Job | None:
        """The first job behind `cursor`."""
        ready = self.ready.after(cursor)
        absent = self.absent.after(cursor) if absent_too else None
        if ready is None or (absent is not None and absent.rank < ready.rank):
            return absent
        return ready
