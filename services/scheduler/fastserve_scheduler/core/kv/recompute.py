"""Recompute: the last in the order loses its blocks and is prefilled again later from prompt and output so far.

What is computed again makes a busy spell longer, and a longer one more of it: left alone that does not end. So while
too much is lost (`waste.py`) a job without KV begins only when nobody loses any for it and some room is left
afterwards. Those on the device run meanwhile, and what they end with is room.
"""

from fastserve_scheduler.core.job import Job
from fastserve_scheduler.core.kv.policy import KvPolicy, gives_way

KEPT_PERCENT = 5
"""Of the pool, or of the host's slots if there are any, kept from those who would begin while too much is lost: for
those who grow, and for two jobs to trade places between the tiers."""


class Recompute(KvPolicy):
    evicts = True

    def tokens_to_hold(self, job: Job, num_tokens: int) -> int:
        """All known tokens, even if a chunk of them runs: a job half prefilled must not lack blocks for the rest."""
        return job.known_tokens

    def victims(self, requester: Job, shortfall: int) -> list[Job] | None:
        if self.saving and not requester.resident:
            return None
        return self._from_the_last(requester, shortfall)

    @property
    def saving(self) -> bool:
        return self._tiers.waste.high

    def holds_back(self, num_blocks: int) -> bool:
        pool = self._tiers.pool
        # With nobody on the device there is nothing to wait for.
        if not self.saving or pool.num_free == pool.num_blocks:
            return False
        return pool.num_free - num_blocks < pool.num_blocks * KEPT_PERCENT // 100

    def _from_the_last(self, requester: Job, shortfall: int) -> list[Job] | None:
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
