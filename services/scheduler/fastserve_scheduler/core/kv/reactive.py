"""Reactive: KV moves when it must. Blocks short: the worst ranked go to the host; a job that is due comes back.

Without host slots it is `recompute`. Where swapping cannot help, because the pool is hardly larger than the running
batch or the host has no room for a victim, a job without KV on the device waits until blocks are free instead of
driving others out; only a job that starves, or one that must grow, still costs others their KV.

With both tiers full and a short alpha that is nearly everybody, and jobs throw each other out faster than they get on.
So while too much is lost (`waste.py`) nobody begins unless some room is left afterwards, and a job that starves on the
host comes back when nobody loses KV for it. Those on the device run meanwhile, and what they end with is room.
"""

from fastserve_scheduler.core.commands import SwapDirection
from fastserve_scheduler.core.job import Job
from fastserve_scheduler.core.kv.policy import gives_way
from fastserve_scheduler.core.kv.recompute import KEPT_PERCENT, Recompute
from fastserve_scheduler.core.kv_state import KvState

MAX_LOOKED_AT = 64
"""Jobs looked at for victims beyond those taken, so that a step stays short."""


class Reactive(Recompute):
    swaps = True

    def victims(self, requester: Job, shortfall: int) -> list[Job] | None:
        if self._tiers.host.num_slots == 0:
            return super().victims(requester, shortfall)
        if not self._must_have(requester) and not self._appetite.roomy(self._tiers.pool.num_blocks):
            return None
        if not self._tiers.may_send(SwapDirection.OUT, shortfall):
            # What is on its way out already is all that the link carries; the blocks come.
            return None
        return self._worst(requester, shortfall) or self._last(requester, shortfall)

    def holds_back(self, num_blocks: int) -> bool:
        if self._tiers.host.num_slots == 0:
            return super().holds_back(num_blocks)
        return self.saving and self._tiers.room - num_blocks < self._tiers.host.num_slots * KEPT_PERCENT // 100

    def _worst(self, requester: Job, shortfall: int) -> list[Job] | None:
        """By the ranking; a job that has not run since it came back stays, unless a starving job needs its blocks."""
        chosen: list[Job] = []
        looks, room = MAX_LOOKED_AT, self._tiers.host_room
        for job in self._ranking.leaving(self._tiers.now_ns):
            stays = job.fresh and not requester.rescued
            lost = self._tiers.lacking(job) > room and not self._must_have(requester)
            if gives_way(job, requester) and not stays and not lost:
                chosen.append(job)
                shortfall -= len(job.table)
                room -= self._tiers.lacking(job)
            else:
                looks -= 1
            if shortfall <= 0:
                return chosen
            if looks == 0:
                break
        return None

    def _last(self, requester: Job, shortfall: int) -> list[Job] | None:
        """Everything else failed: a starving job takes what is behind it in the order."""
        return self._from_the_last(requester, shortfall) if requester.rescued and self._must_have(requester) else None

    def _must_have(self, requester: Job) -> bool:
        """It starves, or the next token of a running job depends on it."""
        patient = self.saving and requester.kv is KvState.HOST
        return requester.resident or (requester.rescued and not patient)
