"""Recompute: the last in the order loses its blocks and is prefilled again later from prompt and output so far."""

from fastserve_scheduler.core.blocks import BlockPool
from fastserve_scheduler.core.job import Job
from fastserve_scheduler.core.kv.policy import KvPolicy, gives_way
from fastserve_scheduler.core.ranked import RankedJobs


class Recompute(KvPolicy):
    evicts = True

    def tokens_to_hold(self, job: Job, num_tokens: int) -> int:
        """All known tokens, even if a chunk of them runs: a job half prefilled must not lack blocks for the rest."""
        return job.known_tokens

    def victims(self, requester: Job, num_blocks: int, idle: RankedJobs, pool: BlockPool) -> list[Job] | None:
        """From the last in the order up, no more than needed."""
        chosen: list[Job] = []
        missing = num_blocks - pool.num_free
        job = idle.last()
        while missing > 0:
            if job is None or not gives_way(job, requester):
                return None
            chosen.append(job)
            missing -= len(job.table)
            job = idle.before(job.rank)
        return chosen
