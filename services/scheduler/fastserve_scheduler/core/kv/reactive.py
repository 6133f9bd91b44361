"""Reactive: KV moves when it must. Blocks short: the worst ranked go to the host; a job that is due comes back.

Without host slots it is `recompute`. Where swapping cannot help, because the pool is hardly larger than the running
batch or the host is full, newcomers wait until blocks are free instead of driving others out; only a job that starves,
or one that must grow, still takes blocks.
"""

from fastserve_scheduler.core.commands import SwapDirection
from fastserve_scheduler.core.job import Job
from fastserve_scheduler.core.kv.policy import gives_way
from fastserve_scheduler.core.kv.recompute import Recompute

MAX_LOOKED_AT = 64
"""Jobs looked at for victims beyond those taken, so that a step stays short."""


class Reactive(Recompute):
    def victims(self, requester: Job, shortfall: int) -> list[Job] | None:
        if self._tiers.host.num_slots == 0:
            return super().victims(requester, shortfall)
        if not (requester.resident or requester.ticket or self._helps()):
            return None
        if not self._tiers.may_send(SwapDirection.OUT, shortfall):
            # What is on its way out already is all that the link carries; the blocks come.
            return None
        return self._worst(requester, shortfall) or self._last(requester, shortfall)

    def _helps(self) -> bool:
        return self._tiers.host_room > 0 and self._appetite.roomy(self._tiers.pool.num_blocks)

    def _worst(self, requester: Job, shortfall: int) -> list[Job] | None:
        """By the ranking; a job that has not run since it came back stays, unless a starving job needs its blocks."""
        chosen: list[Job] = []
        looks = MAX_LOOKED_AT
        for job in self._ranking.leaving(self._tiers.now_ns):
            if gives_way(job, requester) and (requester.ticket or not job.fresh):
                chosen.append(job)
                shortfall -= len(job.table)
            else:
                looks -= 1
            if shortfall <= 0:
                return chosen
            if looks == 0:
                break
        return None

    def _last(self, requester: Job, shortfall: int) -> list[Job] | None:
        """Everything else failed: a starving job takes what is behind it in the order."""
        return super().victims(requester, shortfall) if requester.ticket else None
