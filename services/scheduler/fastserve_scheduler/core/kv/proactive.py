"""Proactive: KV moves before it must, while others run (section 4.3 of the paper).

After each batch two things are done, as far as the link carries them:

- the next jobs to come back are brought in, while the reserve and the blocks that jobs before them wait for stay
  free; a job on the device that is needed much later makes room;
- jobs that no batch has a slot for leave until the reserve is free, so that newcomers find blocks at once.
"""

from collections.abc import Iterator

from fastserve_scheduler.core.commands import SwapDirection
from fastserve_scheduler.core.job import Job
from fastserve_scheduler.core.kv.reactive import MAX_LOOKED_AT, Reactive
from fastserve_scheduler.core.ranked import FIRST

MAX_MOVES = 16
"""Jobs moved ahead of need in one step, each way."""


class Proactive(Reactive):
    def look_ahead(self, claimed: int, running: int) -> None:
        if self._tiers.host.num_slots == 0 or not self._appetite.roomy(self._tiers.pool.num_blocks):
            return
        # A job in a batch may need its next block before anybody can make room.
        kept = self._appetite.reserve(self._tiers.pool.num_blocks) + running + claimed
        if not claimed:
            self._bring_in(kept)
        self._keep_reserve(kept, running)

    def _bring_in(self, kept: int) -> None:
        """Called when nobody who is due waits for blocks."""
        now_ns = self._tiers.now_ns
        newcomer, looks = self._line.absent.after(FIRST), MAX_LOOKED_AT
        for moves, job in enumerate(self._ranking.coming(now_ns)):
            while newcomer is not None and newcomer.rank < job.rank and looks:
                kept += self._needed(newcomer)
                newcomer, looks = self._line.absent.after(newcomer.rank), looks - 1
            needed = self._needed(job)
            if moves == MAX_MOVES or not self._tiers.may_send(SwapDirection.IN, needed):
                return
            if kept + needed > self._tiers.pool.num_free:
                self._make_room(job, kept + needed - self._tiers.pool.num_free)
                return
            if self._ranking.hurried(job, now_ns) and not self._tiers.link.afford_promotion(needed, now_ns):
                return
            self._tiers.bring_in(job, self.tokens_to_hold(job, job.pending_tokens))

    def _needed(self, job: Job) -> int:
        return self._tiers.pool.blocks_for(self.tokens_to_hold(job, job.pending_tokens))

    def _make_room(self, comer: Job, shortfall: int) -> None:
        """Blocks on their way out count: room that is being made is not made twice."""
        now_ns = self._tiers.now_ns
        shortfall -= self._tiers.swaps.blocks[SwapDirection.OUT]
        chosen: list[Job] = []
        for job in self._leaving():
            if shortfall <= 0 or not self._ranking.displaces(comer, job, now_ns):
                break
            chosen.append(job)
            shortfall -= len(job.table)
        if shortfall <= 0:
            self._send_out(chosen)

    def _keep_reserve(self, kept: int, running: int) -> None:
        slots = self._config.max_batch_size * self._config.num_stages
        excess = len(self._line.ready) + running - slots
        shortfall = kept - self._tiers.pool.num_free - self._tiers.swaps.blocks[SwapDirection.OUT]
        chosen: list[Job] = []
        for job in self._leaving():
            if shortfall <= 0 or len(chosen) >= excess:
                break
            chosen.append(job)
            shortfall -= len(job.table)
        self._send_out(chosen)

    def _leaving(self) -> Iterator[Job]:
        """Those that may be moved without need: not before they have run since they came."""
        for looked, job in enumerate(self._ranking.leaving(self._tiers.now_ns)):
            if looked == MAX_LOOKED_AT:
                return
            if not job.fresh:
                yield job

    def _send_out(self, jobs: list[Job]) -> None:
        for job in jobs[:MAX_MOVES]:
            if not (self._tiers.can_store(job) and self._tiers.may_send(SwapDirection.OUT, len(job.table))):
                return
            self._tiers.send_out(job)
