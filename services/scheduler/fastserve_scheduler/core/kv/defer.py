"""Defer: nobody is ever evicted, so a job starts only when the blocks of its longest possible answer are free.

With less than that two half-grown jobs could wait for each other's blocks for ever.
"""

from fastserve_scheduler.core.job import Job
from fastserve_scheduler.core.kv.policy import KvPolicy


class Defer(KvPolicy):
    evicts = False

    def tokens_to_hold(self, job: Job, num_tokens: int) -> int:
        return job.prompt_tokens + job.max_output_tokens

    def victims(self, requester: Job, shortfall: int) -> list[Job] | None:
        return None
