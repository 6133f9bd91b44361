"""Recompute: the last in the order loses its blocks and is prefilled again later from prompt and output so far."""

from fastserve_scheduler.core.job import Job
from fastserve_scheduler.core.kv.policy import KvPolicy, gives_way


class Recompute(KvPolicy):
    evicts = True

    def tokens_to_hold(self, job: Job, num_tokens: int) -> int:
        """All known tokens, even if a chunk of them runs: a job half prefilled must not lack blocks for the rest."""
        return job.known_tokens

    def victims(self, requester: Job, shortfall: int) -> list[Job] | None:
        """From the last in the order up, no more than needed."""
        chosen: list[Job] = []
        job = self._line.ready.last()
        while shortfall > 0:
            if job is None or not gives_way(job, requester):
                return None
            chosen.append(job)
            shortfall -= len(job.table)
            job = self._line.ready.before(job.rank)
        return chosen
