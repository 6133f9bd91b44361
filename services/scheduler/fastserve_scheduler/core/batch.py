"""Forming one batch: walk the order, take what is ready and fits, never wait for a job that is not.

What does not fit is passed over, up to the order's bypass limit, so that a step costs the same however many jobs wait.
The batch takes blocks from idle jobs behind the requester where the KV policy says so; a job in the batch or in
flight is never a victim, because both are out of line. A victim that is swapped out frees its blocks later: the
requester claims them, and nobody without KV takes them before it. A job on the host that the walk reaches is due: it
is swapped in when there are blocks for it, and the batch goes on without it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from fastserve_scheduler.core.budget import BatchBudget
from fastserve_scheduler.core.commands import SwapDirection
from fastserve_scheduler.core.config import CoreConfig
from fastserve_scheduler.core.job import Job
from fastserve_scheduler.core.kv import KvPolicy
from fastserve_scheduler.core.kv.policy import gives_way
from fastserve_scheduler.core.kv_state import KvState
from fastserve_scheduler.core.line import Line
from fastserve_scheduler.core.policies import Order
from fastserve_scheduler.core.ranked import FIRST
from fastserve_scheduler.core.tiers import Tiers

MAX_PASSED_READY = 256
"""Jobs with KV that one step passes over before it makes do with the batch it has."""

MAX_PASSED_AWAY = 64
"""Jobs on the host or on their way that one step passes over before it looks at no more of them."""


class Shortage(StrEnum):
    """What a job was short of when it did not run."""

    SLOTS = "slots"
    TOKENS = "tokens"
    BLOCKS = "blocks"


class Wait(StrEnum):
    """What a job waits for that would be in the batch otherwise."""

    #: Its own KV, blocks that are being copied out, or the link.
    COPY = "copy"
    #: Blocks that nobody gives up.
    ROOM = "room"


class Pick(NamedTuple):
    job: Job
    num_tokens: int


@dataclass(slots=True)
class Batch:
    """What one step decided. The picks own the blocks they need; the jobs that gave way are back in line."""

    picks: list[Pick] = field(default_factory=list)
    #: (victim, for whom).
    gave_way: list[tuple[Job, Job]] = field(default_factory=list)
    #: Jobs that would be in this batch, had every copy landed by now.
    num_blocked: int = 0
    #: Jobs on the host that were reached while a slot was left for them, and have no blocks to come to.
    num_roomless: int = 0
    passed: dict[int, Shortage] = field(default_factory=dict)
    #: What ended the walk: the jobs it did not reach were short of this.
    ended_by: Shortage = Shortage.SLOTS

    def shortage_of(self, job: Job) -> Shortage:
        """What a job that is not in the batch was short of."""
        return self.passed.get(job.job_id, self.ended_by)


class BatchFormer:
    def __init__(
        self,
        config: CoreConfig,
        order: Order,
        line: Line,
        tiers: Tiers,
        kv: KvPolicy,
        flying: Callable[[], list[Job]],
    ) -> None:
        """`flying`: the jobs in flight."""
        self._config, self._order, self._line, self._tiers, self._kv = config, order, line, tiers, kv
        self._flying = flying
        self._pool = tiers.pool

    def form(self, num_flying: int) -> Batch:
        """The next batch, taken out of line; `num_flying` jobs are in flight. Swaps are ordered on the way."""
        batch = Batch()
        runnable = self._num_runnable(num_flying)
        shared = self._config.num_stages > 1 and runnable > 1
        walk = _Walk(
            BatchBudget.of(self._config, self._fair_share(runnable), self._line.num_decodes, shared=shared),
            admitting=not (self._order.whole_batches and len(self._line.ready)),
            bypass_left=self._order.bypass_limit,
            away_left=MAX_PASSED_AWAY if self._tiers.host.num_slots or len(self._tiers.swaps) else 0,
        )
        cursor = FIRST
        while walk.budget.jobs_left and walk.budget.tokens_left > 0:
            job = self._line.next(cursor, absent_too=walk.admitting, away_too=walk.away_left > 0)
            if job is None:
                break
            leads, cursor = cursor == FIRST, job.rank
            shortage = self._try(job, batch, walk, num_flying)
            if shortage is None:
                continue
            if shortage is Shortage.BLOCKS and self._must_drain(job, batch, num_flying, leads=leads):
                break
            if not walk.may_pass(job):
                break
            if job.resident:
                batch.passed[job.job_id] = shortage
        if walk.budget.jobs_left and walk.budget.tokens_left <= 0:
            batch.ended_by = Shortage.TOKENS
        if self._kv.batch_waits and batch.num_blocked:
            self._put_back(batch)
        self._kv.look_ahead(walk.claimed, len(batch.picks) + num_flying)
        return batch

    def _put_back(self, batch: Batch) -> None:
        """Nobody runs before the copies of this batch have landed: all wait for them. Blocks once taken are kept."""
        batch.num_blocked += len(batch.picks)
        for pick in batch.picks:
            self._line.put(pick.job)
        batch.picks.clear()

    def _try(self, job: Job, batch: Batch, walk: "_Walk", num_flying: int) -> Shortage | None:
        """Put the job into the batch, or bring it on its way there; what it is short of, or None."""
        if job.away:
            return self._await(job, batch, walk, num_flying)
        num_tokens = walk.budget.grant(job)
        if num_tokens == 0:
            return Shortage.TOKENS
        hold = self._kv.tokens_to_hold(job, num_tokens)
        needed = self._pool.missing(job.table, hold)
        if not job.resident and self._kv.holds_back(needed):
            walk.admitting = False
            return Shortage.BLOCKS
        wait = self._find_blocks(job, needed, batch, walk, num_flying) if needed else None
        if wait is not None:
            if wait is Wait.COPY:
                walk.note(wait, batch)
            return Shortage.BLOCKS
        walk.budget.take(job, num_tokens)
        self._line.take(job)
        if needed:
            self._tiers.enter(job, hold)
        batch.picks.append(Pick(job, num_tokens))
        return None

    def _await(self, job: Job, batch: Batch, walk: "_Walk", num_flying: int) -> Shortage | None:
        """A job whose KV is away: it comes back when the link and the blocks are free, and runs later."""
        walk.away_left -= 1
        wait, shortage = Wait.COPY, None
        if job.kv is KvState.HOST:
            hold = self._kv.tokens_to_hold(job, job.pending_tokens)
            needed = self._pool.blocks_for(hold)
            if self._tiers.may_send(SwapDirection.IN, needed):
                missing = self._find_blocks(job, needed, batch, walk, num_flying)
                if missing is None:
                    self._tiers.bring_in(job, hold)
                else:
                    wait, shortage = missing, Shortage.BLOCKS
        if walk.budget.grant(job):
            walk.note(wait, batch)
        return shortage

    def _find_blocks(self, job: Job, needed: int, batch: Batch, walk: "_Walk", num_flying: int) -> Wait | None:
        """See to it that the job finds `needed` free blocks, now (None) or when victims have left the device."""
        # A newcomer that left no room for the next block of the jobs ahead would be evicted by them at once.
        spare = len(batch.picks) + num_flying if self._kv.evicts and not job.resident else 0
        wanted = needed + spare
        claimed = 0 if job.resident else walk.claimed
        if wanted <= self._pool.num_free - claimed:
            return None
        leaving = self._tiers.swaps.blocks[SwapDirection.OUT]
        shortfall = wanted + walk.claimed - self._pool.num_free - leaving
        if shortfall > 0:
            victims = walk.victims(self._kv, job, shortfall)
            if victims is None:
                full = self._kv.swaps and not self._tiers.may_send(SwapDirection.OUT, shortfall)
                return Wait.COPY if full else Wait.ROOM
            for victim in victims:
                self._give_way(victim)
                batch.gave_way.append((victim, job))
            if wanted <= self._pool.num_free - claimed:
                return None
        walk.claimed += wanted
        return Wait.COPY

    def _give_way(self, victim: Job) -> None:
        if self._kv.swaps and self._tiers.can_store(victim):
            self._tiers.send_out(victim)
        else:
            self._tiers.throw_out(victim)

    def _must_drain(self, job: Job, batch: Batch, num_flying: int, *, leads: bool) -> bool:
        """The first in the order, or the first ticket, lacks blocks that are in flight: were the jobs behind it planned
        again while others are still out, its blocks would never be idle all at once."""
        if batch.picks or not self._kv.evicts or (self._kv.saving and not job.resident):
            return False
        if not num_flying:
            job.drained |= leads
            return False
        return job.ticket or (leads and not job.drained and self._frees_enough(job))

    def _frees_enough(self, job: Job) -> bool:
        """A job without KV finds its blocks as soon as nothing is in flight."""
        if job.kv is not KvState.ABSENT:
            return False
        needed = self._pool.blocks_for(self._kv.tokens_to_hold(job, job.pending_tokens))
        flying = sum(len(victim.table) for victim in self._flying() if gives_way(victim, job))
        return self._kv.victims(job, max(0, needed - self._pool.num_free - flying)) is not None

    def _fair_share(self, runnable: int) -> int:
        """Jobs a batch may take. With fewer than P*B runnable ones on P stages, ceil(runnable/P): a batch that took
        more would leave a later stage nothing to do."""
        stages, size = self._config.num_stages, self._config.max_batch_size
        return size if stages == 1 else max(1, min(size, -(-runnable // stages)))

    def _num_runnable(self, num_flying: int) -> int:
        """Jobs in flight, with KV, or with room for it: counted as far as all stages can use."""
        stages, size = self._config.num_stages, self._config.max_batch_size
        runnable = num_flying + len(self._line.ready)
        if stages == 1:
            return runnable
        free = self._pool.num_free
        job = self._line.absent.after(FIRST)
        while job is not None and runnable < stages * size:
            free -= self._pool.missing(job.table, self._kv.tokens_to_hold(job, job.pending_tokens))
            if free < 0:
                break
            runnable += 1
            job = self._line.absent.after(job.rank)
        return runnable


@dataclass(slots=True)
class _Walk:
    """The state of one walk along the order."""

    budget: BatchBudget
    admitting: bool
    bypass_left: int
    away_left: int
    #: Blocks that jobs reached before were promised, free already or not.
    claimed: int = 0
    passed_ready: int = 0
    #: Fewest blocks that could not be had, for jobs without and with KV. A later job of the same kind has no victims
    #: that an earlier one had not, so asking for as many again is in vain.
    hopeless: list[int | None] = field(default_factory=lambda: [None, None])

    def victims(self, kv: KvPolicy, job: Job, shortfall: int) -> list[Job] | None:
        hopeless = self.hopeless[job.resident]
        if hopeless is not None and shortfall >= hopeless:
            return None
        # The requester is in line itself, and may not be its own victim: victims rank strictly behind it.
        victims = kv.victims(job, shortfall)
        if victims is None:
            self.hopeless[job.resident] = shortfall
        return victims

    def note(self, wait: Wait, batch: Batch) -> None:
        """Count a job that waits, while a slot is left for it beside those that wait for copies before it."""
        if self.budget.jobs_left > batch.num_blocked:
            batch.num_blocked += wait is Wait.COPY
            batch.num_roomless += wait is Wait.ROOM

    def may_pass(self, job: Job) -> bool:
        """Count a job that did not fit; False: look no further. Nobody without KV passes one that holds a ticket."""
        if job.resident:
            self.passed_ready += 1
            return self.passed_ready < MAX_PASSED_READY
        self.bypass_left -= 1
        if self.bypass_left < 0 or job.ticket:
            self.admitting = False
        return True
