"""What must be true after every event. Run in tests, under FASTSERVE_CHECK=1 and never for effect."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastserve_scheduler.core.commands import SwapDirection
from fastserve_scheduler.core.job import Job
from fastserve_scheduler.core.kv_state import KvState

if TYPE_CHECKING:
    from fastserve_scheduler.core.scheduler import SchedulerCore


class InvariantViolation(Exception):
    """The core contradicts itself: a defect, to be reported with the journal."""


def check(core: SchedulerCore) -> None:
    _check_places(core)
    _check_blocks(core)
    _check_host(core)
    _check_swaps(core)
    _check_plans(core)
    _check_counts(core)
    _check_progress(core)


def _require(holds: bool, what: str, core: SchedulerCore, job: Job | None = None) -> None:
    if not holds:
        story = "" if job is None else "\n" + "\n".join(str(moment) for moment in core.story(job.job_id))
        raise InvariantViolation(f"{what}{'' if job is None else f' (job {job.job_id})'}{story}")


def _check_places(core: SchedulerCore) -> None:
    """Each job is either in flight in one plan, or in line once, under its present rank."""
    flying = [job for flight in core.flights.values() for job in flight.jobs]
    waiting = core.line.jobs()
    placed = sorted(job.job_id for job in [*flying, *waiting])
    _require(placed == sorted(core.jobs), f"jobs {sorted(core.jobs)} are in places of {placed}", core)
    for job in core.jobs.values():
        _require(job.started or job.level >= job.joined_level, "promoted before its first token", core, job)
    for job in waiting:
        _require(not job.in_flight, "in line and in flight", core, job)
        _require(not job.aborted, "aborted, but waits", core, job)
        _require(job.rank == core.order.rank(job), "in line under an old rank", core, job)
    for jobs in (core.line.ready, core.line.absent, core.line.hosted, core.line.moving):
        ranks = [job.rank for job in jobs]
        _require(ranks == sorted(ranks), "the line is out of order", core)
    on_clock = sorted(job.job_id for job in core.clock.jobs())
    _require(on_clock == sorted(job.job_id for job in waiting), "who waits and who is on the clock differ", core)


def _check_blocks(core: SchedulerCore) -> None:
    """Every block is free or owned by one job, or by a swap whose job is gone."""
    ended = [swap.job for swap in core.tiers.swaps.all() if swap.job.aborted]
    owned = [block_id for job in [*core.jobs.values(), *ended] for block_id in job.table.block_ids]
    every = sorted([*owned, *core.pool.free_ids()])
    _require(every == list(range(core.pool.num_blocks)), f"blocks lost or doubled: {every}", core)
    for job in core.jobs.values():
        _require(job.computed <= job.known_tokens, "has KV of tokens not known", core, job)
        room = len(job.table) * core.pool.block_size
        match job.kv:
            case KvState.DEVICE | KvState.INCOMING:
                _require(job.computed <= room, "has more KV than blocks", core, job)
            case KvState.OUTGOING:
                _require(room > 0, "leaves without blocks", core, job)
            case KvState.ABSENT:
                _require(room == 0 and job.computed == 0, "absent with KV", core, job)
            case KvState.HOST:
                _require(room == 0 and job.computed > 0, "on the host and on the device", core, job)


def _check_host(core: SchedulerCore) -> None:
    """Every granted slot is free, holds a block of one job, or is being written by one swap."""
    tiers, size = core.tiers, core.pool.block_size
    swaps = tiers.swaps.all()
    ended = [swap.job for swap in swaps if swap.job.aborted]
    held = [slot for job in [*core.jobs.values(), *ended] for slot in job.host.slots]
    for swap in swaps:
        if swap.op.direction is SwapDirection.OUT and not swap.void:
            held += swap.op.host_slots
    every = sorted([*held, *tiers.host.free_slots()])
    _require(every == sorted(tiers.host.all_slots()), f"host slots lost or doubled: {every}", core)
    for job in core.jobs.values():
        copied = job.host.num_tokens
        _require(len(job.host.slots) == -(-copied // size), "has a host copy of another size", core, job)
        if job.kv is KvState.HOST:
            _require(copied == job.computed, "is on the host in part", core, job)
        if job.kv in (KvState.DEVICE, KvState.OUTGOING):
            _require(copied % size == 0 and copied <= job.computed, "has a stale host copy", core, job)
    clean = [job.job_id for job in tiers.clean_jobs()]
    kept = [job.job_id for job in core.jobs.values() if job.resident and job.host.slots]
    _require(sorted(clean) == sorted(kept), f"host copies of {kept} are known of {clean}", core)


def _check_swaps(core: SchedulerCore) -> None:
    """Who is on the way is in one swap, and is not in a batch; nothing is ordered and not sent."""
    tiers = core.tiers
    moving = sorted(job.job_id for job in core.line.moving)
    swapped = sorted(swap.job.job_id for swap in tiers.swaps.all() if not swap.job.aborted)
    _require(moving == swapped, f"{moving} move, swaps are of {swapped}", core)
    _require(not tiers.swaps.unsent(), "a swap was ordered and not sent", core)
    for flight in core.flights.values():
        _require(all(job.resident for job in flight.jobs), "KV is away of a job in flight", core)
    for direction in SwapDirection:
        ops = [swap.op for swap in tiers.swaps.all() if swap.op.direction is direction]
        blocks = sum(len(op.device_blocks) for op in ops)
        counted = (tiers.swaps.count[direction], tiers.swaps.blocks[direction])
        _require(counted == (len(ops), blocks), f"count of swaps {direction}", core)


def _check_plans(core: SchedulerCore) -> None:
    _require(len(core.flights) <= core.config.num_stages, "more batches than stages", core)
    for seq, flight in core.flights.items():
        _require(flight.plan.seq == seq and flight.plan.epoch == core.epoch, f"plan {seq} is stale", core)
        _require(len(flight.jobs) <= flight.config.max_batch_size, f"plan {seq} is too large", core)
        num_tokens = sum(item.num_tokens for item in flight.plan.items)
        fits = num_tokens <= flight.config.max_batch_tokens or len(flight.jobs) == 1
        _require(fits, f"plan {seq} has {num_tokens} tokens", core)
        for item, job in zip(flight.plan.items, flight.jobs, strict=True):
            _require(job.seq == seq and core.jobs.get(job.job_id) is job, "flies in another plan", core, job)
            _require(item.block_table == job.table.block_ids, "its KV moved in flight", core, job)
            reach = item.start + item.num_tokens
            room = len(item.block_table) * core.pool.block_size
            _require(reach <= room and item.num_tokens > 0, "its plan exceeds its blocks", core, job)


def _check_counts(core: SchedulerCore) -> None:
    flying = sum(len(flight.jobs) for flight in core.flights.values())
    _require(core.num_flying == flying, "count of jobs in flight", core)
    waiting = core.line.jobs()
    tokens = sum(job.prompt_tokens for job in waiting)
    _require(core.waiting_prompt_tokens == tokens, "count of waiting prompt tokens", core)
    unstarted_ns = sum(job.first_ns for job in core.jobs.values())
    _require(core.unstarted_ns == unstarted_ns, "count of first iterations to come", core)
    decodes = sum(job.is_decode for job in core.line.ready)
    _require(core.line.num_decodes == decodes, "count of ready decodes", core)
    sizes = core.order.level_sizes()
    if sizes:
        counted = [0] * len(sizes)
        for job in core.jobs.values():
            counted[job.level] += 1
        _require(tuple(counted) == sizes, f"jobs per level {counted}, counted as {sizes}", core)


def _check_progress(core: SchedulerCore) -> None:
    """Work exists, every stage is up: something is in flight, or on its way between the tiers."""
    stuck = core.stages_up and core.jobs and not core.flights and not core.tiers.swaps
    _require(not stuck, f"{len(core.jobs)} jobs wait and nothing runs", core)
