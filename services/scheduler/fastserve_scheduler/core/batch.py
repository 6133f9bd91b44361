"""Forming one batch: walk the order, take what is ready and fits, never wait for a job that is not.

What does not fit is passed over, up to the order's bypass limit, so that a step costs the same however many jobs wait.
The batch takes blocks from idle jobs behind the requester where the KV policy says so; a job in the batch or in
flight is never a victim, because both are out of line.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from fastserve_scheduler.core.blocks import BlockPool
from fastserve_scheduler.core.budget import BatchBudget
from fastserve_scheduler.core.config import CoreConfig
from fastserve_scheduler.core.job import Job
from fastserve_scheduler.core.kv import KvPolicy
from fastserve_scheduler.core.line import Line
from fastserve_scheduler.core.policies import Order
from fastserve_scheduler.core.ranked import FIRST

MAX_PASSED_READY = 256
"""Jobs with KV that one step passes over before it makes do with the batch it has."""


class Shortage(StrEnum):
    """What a job was short of when it did not run."""

    SLOTS = "slots"
    TOKENS = "tokens"
    BLOCKS = "blocks"


@dataclass(frozen=True, slots=True)
class Pick:
    job: Job
    num_tokens: int


@dataclass(slots=True)
class Batch:
    """What one step decided. The picks own the blocks they need; evicted jobs are back in line without KV."""

    picks: list[Pick] = field(default_factory=list)
    evicted: list[tuple[Job, Job]] = field(default_factory=list)
    passed: dict[int, Shortage] = field(default_factory=dict)
    #: What ended the walk: the jobs it did not reach were short of this.
    ended_by: Shortage = Shortage.SLOTS

    def shortage_of(self, job: Job) -> Shortage:
        """What a job that is not in the batch was short of."""
        return self.passed.get(job.job_id, self.ended_by)


class BatchFormer:
    def __init__(self, config: CoreConfig, order: Order, line: Line, pool: BlockPool, kv: KvPolicy) -> None:
        self._config, self._order, self._line, self._pool, self._kv = config, order, line, pool, kv

    def form(self, num_flying: int) -> Batch:
        """The next batch, taken out of line; `num_flying` jobs are in flight."""
        batch = Batch()
        walk = _Walk(
            BatchBudget.of(self._config, self._fair_share(num_flying), self._line.num_decodes),
            admitting=not (self._order.whole_batches and len(self._line.ready)),
            bypass_left=self._order.bypass_limit,
        )
        cursor = FIRST
        while walk.budget.jobs_left and walk.budget.tokens_left > 0:
            job = self._line.next(cursor, absent_too=walk.admitting)
            if job is None:
                break
            cursor = job.rank
            shortage = self._try(job, batch, walk, num_flying)
            if shortage is None:
                continue
            if shortage is Shortage.BLOCKS and job.ticket and self._must_drain(batch, num_flying):
                break
            if not walk.may_pass(job):
                break
            if job.resident:
                batch.passed[job.job_id] = shortage
        if walk.budget.jobs_left and walk.budget.tokens_left <= 0:
            batch.ended_by = Shortage.TOKENS
        return batch

    def _try(self, job: Job, batch: Batch, walk: "_Walk", num_flying: int) -> Shortage | None:
        num_tokens = walk.budget.grant(job)
        if num_tokens == 0:
            return Shortage.TOKENS
        hold = self._kv.tokens_to_hold(job, num_tokens)
        needed = self._pool.missing(job.table, hold)
        if needed:
            # A newcomer that left no room for the next block of the jobs ahead would be evicted by them at once.
            spare = len(batch.picks) + num_flying if self._kv.evicts and not job.resident else 0
            victims = walk.victims(self._kv, job, needed + spare, self._line, self._pool)
            if victims is None:
                return Shortage.BLOCKS
            for victim in victims:
                self._evict(victim)
                batch.evicted.append((victim, job))
        walk.budget.take(job, num_tokens)
        self._line.take(job)
        if needed:
            self._pool.grow(job.table, hold)
        batch.picks.append(Pick(job, num_tokens))
        return None

    def _evict(self, job: Job) -> None:
        self._line.take(job)
        self._pool.release(job.table)
        job.computed, job.discarding = 0, False
        self._line.put(job)

    def _must_drain(self, batch: Batch, num_flying: int) -> bool:
        """The first in the order holds a ticket and its blocks are in flight: were the jobs behind it planned again
        while others are still out, its blocks would never be idle all at once."""
        return not batch.picks and num_flying > 0 and self._kv.evicts

    def _fair_share(self, num_flying: int) -> int:
        """Jobs a batch may take. With fewer than P*B runnable ones on P stages, ceil(runnable/P): a batch that took
        more would leave a later stage nothing to do."""
        stages, size = self._config.num_stages, self._config.max_batch_size
        if stages == 1:
            return size
        runnable = num_flying + len(self._line.ready)
        free = self._pool.num_free
        job = self._line.absent.after(FIRST)
        while job is not None and runnable < stages * size:
            free -= self._pool.missing(job.table, self._kv.tokens_to_hold(job, job.pending_tokens))
            if free < 0:
                break
            runnable += 1
            job = self._line.absent.after(job.rank)
        return max(1, min(size, -(-runnable // stages)))


@dataclass(slots=True)
class _Walk:
    """The state of one walk along the order."""

    budget: BatchBudget
    admitting: bool
    bypass_left: int
    passed_ready: int = 0
    #: Fewest blocks that could not be had, for jobs without and with KV. A later job of the same kind has no victims
    #: that an earlier one had not, so asking for as many again is in vain.
    hopeless: list[int | None] = field(default_factory=lambda: [None, None])

    def victims(self, kv: KvPolicy, job: Job, num_blocks: int, line: Line, pool: BlockPool) -> list[Job] | None:
        if num_blocks <= pool.num_free:
            return []
        hopeless = self.hopeless[job.resident]
        if hopeless is not None and num_blocks >= hopeless:
            return None
        # The requester is in line itself, and may not be its own victim: victims rank strictly behind it.
        victims = kv.victims(job, num_blocks, line.ready, pool)
        if victims is None:
            self.hopeless[job.resident] = num_blocks
        return victims

    def may_pass(self, job: Job) -> bool:
        """Count a job that did not fit; False: look no further. Nobody without KV passes one that holds a ticket."""
        if job.resident:
            self.passed_ready += 1
            return self.passed_ready < MAX_PASSED_READY
        self.bypass_left -= 1
        if self.bypass_left < 0 or job.ticket:
            self.admitting = False
        return True
