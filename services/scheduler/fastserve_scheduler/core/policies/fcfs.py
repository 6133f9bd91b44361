"""First come, first served, with iteration-level batching: what Orca and vLLM do."""

from fastserve_scheduler.core.job import Job, Rank
from fastserve_scheduler.core.policies.order import Order


class Fcfs(Order):
    def join(self, job: Job) -> None:
        job.place = self._tail()

    def rank(self, job: Job) -> Rank:
        return (job.place,)
