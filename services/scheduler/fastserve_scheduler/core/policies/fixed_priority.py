"""Fixed priority: the request's own, lower first; then shorter input first, which is all of it when nobody sets one.

Without rescue: a low priority waits as long as higher ones keep coming.
"""

from fastserve_scheduler.core.job import Job, Rank
from fastserve_scheduler.core.policies.order import Order


class FixedPriority(Order):
    def join(self, job: Job) -> None:
        job.place = self._tail()

    def rank(self, job: Job) -> Rank:
        return (job.priority, job.prompt_tokens, job.place)
