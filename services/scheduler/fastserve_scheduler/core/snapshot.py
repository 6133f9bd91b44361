"""What the core shows to metrics and `top`. Cheap enough to take at every scrape: jobs that wait are looked at only
until one of each queue is known, which is all of them where a queue has nobody waiting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastserve_scheduler.core.batch import Shortage
from fastserve_scheduler.core.commands import SwapDirection
from fastserve_scheduler.core.prediction import ONE
from fastserve_scheduler.core.request_times import RequestTimes, RequestTimesSnapshot
from fastserve_scheduler.core.residency import ResidencySnapshot
from fastserve_scheduler.core.tally import TallySnapshot

if TYPE_CHECKING:
    from fastserve_scheduler.core.scheduler import SchedulerCore


@dataclass(slots=True)
class Counters:
    """Totals since the core was made."""

    iterations: int = 0
    accepted: int = 0
    rejected: int = 0
    finished: int = 0
    generated_tokens: int = 0
    #: Tokens computed a second time because their KV was given up or lost.
    recomputed_tokens: int = 0
    times: RequestTimes = field(default_factory=RequestTimes)
    #: Jobs that were running and had to stop, by what they were short of. BLOCKS: KV evicted.
    preemptions: dict[Shortage, int] = field(default_factory=lambda: dict.fromkeys(Shortage, 0))


@dataclass(frozen=True, slots=True)
class LevelCount:
    waiting: int
    running: int


@dataclass(frozen=True, slots=True)
class SwapSnapshot:
    """KV on its way to the host and back. Totals are since the core was made."""

    #: Jobs whose KV is on the host alone.
    swapped: int
    host_slots_free: int
    host_slots_total: int
    #: Swaps under way.
    in_flight_out: int
    in_flight_in: int
    #: Device blocks that become free when what is on its way out has landed.
    blocks_leaving: int
    #: Swaps that landed, in whatever way, and the bytes they moved, all stages together.
    swaps_out: int
    swaps_in: int
    bytes_out: int
    bytes_in: int
    failed: int
    #: Blocks that left without being copied: the host had them already.
    clean_blocks_reused: int
    #: Times a starving job on the host had to wait for the link's share before it was promoted.
    promotions_put_off: int
    #: As `DueClock` has them: sums over jobs of the time they waited for copies alone, and for blocks to come back to;
    #: and the time in which nothing was in flight because of copies.
    blocked_ns: int
    roomless_ns: int
    stalled_ns: int
    #: When swapped jobs ran again minus when ENST expected it: counts by `enst.ERROR_BOUNDS_NS`, one more at the end.
    enst_error_counts: tuple[int, ...]
    enst_error_sum_ns: int
    #: Bytes of one swap, all stages together.
    sizes: Mapping[SwapDirection, TallySnapshot]
    residency: ResidencySnapshot


@dataclass(frozen=True, slots=True)
class GuesserSnapshot:
    """Somebody who guesses output lengths. `log_error`: root of the mean square of ln(guess / truth) lately."""

    name: str
    believed: bool
    seen: int
    log_error: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    ready: bool
    epoch: int
    levels: tuple[LevelCount, ...]
    quantum_ns: tuple[int, ...]
    jobs: int
    running: int
    waiting: int
    waiting_prompt_tokens: int
    resident: int
    batches_in_flight: int
    blocks_free: int
    blocks_total: int
    iterations: int
    accepted: int
    rejected: int
    finished: int
    preemptions_slots: int
    preemptions_tokens: int
    preemptions_blocks: int
    promotions: int
    #: By the queue that the job was in.
    promotions_by_level: tuple[int, ...]
    tickets: int
    demotions: tuple[int, ...]
    generated_tokens: int
    recomputed_tokens: int
    #: Time since the job that waits longest last ran.
    longest_wait_ns: int
    #: The same, by queue.
    longest_wait_ns_by_level: tuple[int, ...]
    #: Observed over predicted time of first iterations.
    prefill_correction: float
    swap: SwapSnapshot
    times: RequestTimesSnapshot
    block_size: int
    guessers: tuple[GuesserSnapshot, ...] = ()


def take(core: SchedulerCore, ready: bool, now_ns: int) -> Snapshot:
    """The core as it stands."""
    sizes = core.order.level_sizes() or (len(core.jobs),)
    running = [0] * len(sizes)
    for flight in core.flights.values():
        for job in flight.jobs:
            running[job.level if len(sizes) > 1 else 0] += 1
    counters = core.counters
    return Snapshot(
        ready=ready,
        epoch=core.epoch,
        levels=tuple(LevelCount(size - busy, busy) for size, busy in zip(sizes, running, strict=True)),
        quantum_ns=core.order.quanta_ns(),
        jobs=len(core.jobs),
        running=core.num_flying,
        waiting=len(core.jobs) - core.num_flying,
        waiting_prompt_tokens=core.waiting_prompt_tokens,
        resident=len(core.line.ready) + core.num_flying,
        batches_in_flight=len(core.flights),
        blocks_free=core.pool.num_free,
        blocks_total=core.pool.num_blocks,
        iterations=counters.iterations,
        accepted=counters.accepted,
        rejected=counters.rejected,
        finished=counters.finished,
        preemptions_slots=counters.preemptions[Shortage.SLOTS],
        preemptions_tokens=counters.preemptions[Shortage.TOKENS],
        preemptions_blocks=counters.preemptions[Shortage.BLOCKS],
        promotions=core.rescue.promotions,
        promotions_by_level=tuple(core.rescue.promoted[level] for level in range(len(sizes))),
        tickets=core.rescue.tickets,
        demotions=core.order.demotions(),
        generated_tokens=counters.generated_tokens,
        recomputed_tokens=counters.recomputed_tokens,
        longest_wait_ns=core.clock.longest_wait_ns(now_ns),
        longest_wait_ns_by_level=core.clock.longest_waits_ns(len(sizes), now_ns),
        prefill_correction=core.predictor.correction / ONE,
        swap=_swap(core),
        times=counters.times.snapshot(),
        block_size=core.pool.block_size,
        guessers=tuple(
            GuesserSnapshot(guesser.value, record.believed, record.seen, record.log_error)
            for guesser, record in core.lengths.records.items()
        ),
    )


def _swap(core: SchedulerCore) -> SwapSnapshot:
    tiers = core.tiers
    out, in_ = SwapDirection.OUT, SwapDirection.IN
    return SwapSnapshot(
        swapped=len(core.line.hosted),
        host_slots_free=tiers.host.num_free,
        host_slots_total=tiers.host.num_slots,
        in_flight_out=tiers.swaps.count[out],
        in_flight_in=tiers.swaps.count[in_],
        blocks_leaving=tiers.swaps.blocks[out],
        swaps_out=tiers.counters.swaps[out],
        swaps_in=tiers.counters.swaps[in_],
        bytes_out=tiers.counters.num_bytes[out],
        bytes_in=tiers.counters.num_bytes[in_],
        failed=tiers.counters.failed,
        clean_blocks_reused=tiers.counters.clean_blocks_reused,
        promotions_put_off=core.rescue.put_off,
        blocked_ns=core.due_clock.blocked_ns,
        roomless_ns=core.due_clock.roomless_ns,
        stalled_ns=core.due_clock.stalled_ns,
        enst_error_counts=tuple(tiers.enst_errors.counts),
        enst_error_sum_ns=tiers.enst_errors.total,
        sizes={direction: tally.snapshot() for direction, tally in tiers.counters.sizes.items()},
        residency=tiers.residency.snapshot(),
    )
