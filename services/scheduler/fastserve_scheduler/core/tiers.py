"""A job's KV between device and host: the only place where it changes hands.

Decisions are others' (`kv/`); here they are carried out, so that blocks and slots have one owner at any time. Idle jobs
are taken out of line, changed and put back by these methods; jobs in a batch are out of line already.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from fastserve_scheduler.core.blocks import BlockPool
from fastserve_scheduler.core.commands import Command, FreeHost, KeepHost, SwapDirection
from fastserve_scheduler.core.enst import ERROR_BOUNDS_NS, Enst
from fastserve_scheduler.core.events import SwapDone
from fastserve_scheduler.core.history import Happening, History
from fastserve_scheduler.core.host import HostCopy, HostSlots
from fastserve_scheduler.core.job import Job
from fastserve_scheduler.core.kv_state import KV_MOVES, InvalidTransition, KvState
from fastserve_scheduler.core.line import Line
from fastserve_scheduler.core.link import Link
from fastserve_scheduler.core.residency import Residency
from fastserve_scheduler.core.swaps import Swap, Swaps
from fastserve_scheduler.core.tally import Tally
from fastserve_scheduler.core.waste import Waste

SIZE_BOUNDS_BYTES = tuple(mega * 1_000_000 for mega in (1, 5, 10, 20, 40, 60, 80, 100, 150, 200))
"""Of the histogram of swaps: vLLM's for what it offloads."""


def _sizes() -> dict[SwapDirection, Tally]:
    return {direction: Tally(SIZE_BOUNDS_BYTES) for direction in SwapDirection}


@dataclass(slots=True)
class SwapCounters:
    """Totals since the core was made. Bytes: of all stages, of copies that landed."""

    swaps: dict[SwapDirection, int] = field(default_factory=lambda: dict.fromkeys(SwapDirection, 0))
    num_bytes: dict[SwapDirection, int] = field(default_factory=lambda: dict.fromkeys(SwapDirection, 0))
    failed: int = 0
    #: Blocks that went out without being copied, because the host had them.
    clean_blocks_reused: int = 0
    #: Bytes of one swap.
    sizes: dict[SwapDirection, Tally] = field(default_factory=_sizes)


class Tiers:
    def __init__(self, pool: BlockPool, line: Line, history: History, link: Link, enst: Enst, num_stages: int) -> None:
        self.pool, self.line, self.link = pool, line, link
        self.host = HostSlots()
        self.waste = Waste()
        self.swaps = Swaps(num_stages)
        self.counters = SwapCounters()
        self.enst_errors = Tally(ERROR_BOUNDS_NS)
        self.residency = Residency()
        #: Time of the event being handled.
        self.now_ns = 0
        self._history, self._enst = history, enst
        self._said: list[Command] = []
        #: Jobs on the device with a host copy of their full blocks, oldest copy first.
        self._clean: OrderedDict[int, Job] = OrderedDict()
        self._clean_slots = 0

    def rewire(self, line: Line, enst: Enst) -> None:
        """Another order, another line; nothing moves."""
        self.line, self._enst = line, enst

    def say(self) -> list[Command]:
        """What the driver is to be told; once."""
        said, self._said = self._said, []
        return said

    # ---- on the device

    def enter(self, job: Job, num_tokens: int) -> None:
        """Let the job's blocks hold `num_tokens`; the job is out of line."""
        self.pool.grow(job.table, num_tokens)
        if job.kv is KvState.ABSENT:
            self._move(job, KvState.DEVICE)

    def runs(self, job: Job) -> None:
        """The job is in a batch now."""
        if job.fresh:
            job.fresh = False
            self.residency.returned(job, self.now_ns)
        self.waste.ran()
        if job.promised_ns:
            self.enst_errors.observe(self.now_ns - job.promised_ns)
            job.promised_ns = 0

    def give_up_device(self, job: Job) -> None:
        """The blocks are free at once; what the host has of the job stays, the rest is computed again."""
        self.pool.release(job.table)
        self._unclean(job)
        job.discarding = job.fresh = False
        self._rest_on_host(job)

    def throw_out(self, job: Job) -> None:
        """Evict the job for another one: what the host has no copy of is computed again."""
        self.waste.lost(job.computed - job.host.num_tokens)
        self.evict(job)

    def evict(self, job: Job) -> None:
        self.line.take(job)
        self.give_up_device(job)
        self.line.put(job)

    def forget(self, job: Job) -> None:
        """The job's KV is of no use any more, wherever it is. What is being copied is freed when it has landed."""
        self._unclean(job)
        job.discarding = job.fresh = False
        if job.kv is KvState.INCOMING:
            return
        self._free_host(job)
        if job.kv is KvState.OUTGOING:
            return
        self.pool.release(job.table)
        job.computed = 0
        if job.kv is not KvState.ABSENT:
            self._move(job, KvState.ABSENT)

    # ---- to the host and back

    def can_store(self, job: Job) -> bool:
        """The host has room for what it lacks of an idle job, if need be in place of copies of jobs on the device."""
        room = self.host.num_free + self._clean_slots - len(job.host.slots)
        return self.host.num_slots > 0 and room >= self.lacking(job)

    def lacking(self, job: Job) -> int:
        """Blocks with KV of an idle job that the host has no copy of: the slots that a swap out takes."""
        return self.pool.blocks_for(job.computed) - len(job.host.slots)

    @property
    def host_room(self) -> int:
        """Slots that are free, or hold copies of jobs on the device."""
        return self.host.num_free + self._clean_slots

    @property
    def room(self) -> int:
        """Blocks of KV that both tiers still take, as soon as what is under way has landed."""
        return self.pool.num_free + self.host_room + sum(self.swaps.blocks.values())

    def may_send(self, direction: SwapDirection, num_blocks: int) -> bool:
        return self.link.may_send(direction, num_blocks, self.swaps.blocks[direction], self.pool.num_blocks)

    def send_out(self, job: Job) -> None:
        """Swap an idle job out. Its clean and empty blocks are free at once, the others when the copy has landed."""
        tail, clean = self.lacking(job), len(job.host.slots)
        if tail == 0:
            self.counters.clean_blocks_reused += clean
            self.evict(job)
            return
        self.line.take(job)
        self._unclean(job)
        slots = self._take_slots(tail)
        self.pool.keep(job.table, clean, clean + tail)
        self.counters.clean_blocks_reused += clean
        op = self.swaps.order(job, SwapDirection.OUT, job.table.block_ids, slots)
        self._move(job, KvState.OUTGOING)
        if self._enst.known:
            job.promised_ns = self.now_ns + self._enst.of(job, self.now_ns)
        self._record(job, Happening.SWAP_OUT, op.swap_id)
        self.line.put(job)

    def bring_in(self, job: Job, num_tokens: int) -> None:
        """Swap a job in, with blocks for `num_tokens`. Raises BlockError when they are not free."""
        self.line.take(job)
        self.pool.grow(job.table, num_tokens)
        slots = job.host.slots
        op = self.swaps.order(job, SwapDirection.IN, job.table.block_ids[: len(slots)], slots)
        self._move(job, KvState.INCOMING)
        self._record(job, Happening.SWAP_IN, op.swap_id)
        self.line.put(job)

    def landed(self, event: SwapDone) -> None:
        swap = self.swaps.report(event)
        if swap is None:
            return
        op = swap.op
        self.counters.swaps[op.direction] += 1
        self.counters.num_bytes[op.direction] += swap.num_bytes
        self.counters.sizes[op.direction].observe(swap.num_bytes)
        self.counters.failed += not swap.ok
        if swap.good:
            self.link.observe_copy(op.direction, len(op.device_blocks), swap.copy_ns)
        if swap.job.aborted:
            self._bury(swap)
            return
        job = swap.job
        self.line.take(job)
        if op.direction is SwapDirection.OUT:
            self._out_landed(swap)
        else:
            self._in_landed(swap)
        self._record(job, Happening.SWAPPED if swap.good else Happening.SWAP_FAILED, op.swap_id)
        self.line.put(job)

    # ---- losses

    def stages_fell(self, epoch: int) -> None:
        """All device KV is lost and no copy under way will land. Jobs with a host copy are swapped in again."""
        for swap in self.swaps.end_all():
            job = swap.job
            if job.aborted:
                self._bury(swap)
                continue
            self.line.take(job)
            if swap.op.direction is SwapDirection.OUT and not swap.void:
                self.host.give_back(swap.op.host_slots)
            self.pool.release(job.table)
            self._rest_on_host(job)
            self._record(job, Happening.LOST_STAGE, epoch)
            self.line.put(job)
        for job in tuple(self.line.ready):
            self.evict(job)
            self._record(job, Happening.LOST_STAGE, epoch)

    def host_fell(self) -> None:
        """All host copies and grants are void; nobody is told to free them."""
        self.host.void()
        for job in self._clean.values():
            job.host = HostCopy()
        self._clean.clear()
        self._clean_slots = 0
        for swap in self.swaps.all():
            swap.void = True
            swap.job.host = HostCopy()
        for job in tuple(self.line.hosted):
            self.line.take(job)
            self._record(job, Happening.LOST_HOST, job.host.num_tokens)
            job.host = HostCopy()
            self._rest_on_host(job)
            self.line.put(job)

    # ---- parts of these

    def _rest_on_host(self, job: Job) -> None:
        """Nothing of the job is on the device any more: what is left is the host copy."""
        job.computed = job.host.num_tokens
        self._move(job, KvState.HOST if job.host.slots else KvState.ABSENT)

    def _out_landed(self, swap: Swap) -> None:
        job = swap.job
        self.pool.release(job.table)
        if swap.good:
            job.host = HostCopy(job.host.slots + swap.op.host_slots, job.computed)
            self._said.append(KeepHost(job.job_id, swap.op.host_slots))
        else:
            if not swap.void:
                self.host.give_back(swap.op.host_slots)
            self._free_host(job)
        self._rest_on_host(job)

    def _in_landed(self, swap: Swap) -> None:
        job = swap.job
        if not swap.good:
            self.pool.release(job.table)
            self._free_host(job)
            self._rest_on_host(job)
            return
        # The last block will be written to; a copy of the full ones stays right.
        full = job.computed // self.pool.block_size
        self._free_host(job, keep=full)
        self._move(job, KvState.DEVICE)
        job.fresh = True
        if full:
            self._clean[job.job_id] = job
            self._clean_slots += full

    def _bury(self, swap: Swap) -> None:
        """The swap of a job that ended meanwhile is over."""
        job = swap.job
        self.pool.release(job.table)
        if swap.op.direction is SwapDirection.OUT and not swap.void:
            self.host.give_back(swap.op.host_slots)
        self._free_host(job)
        self._move(job, KvState.ABSENT)

    def _take_slots(self, count: int) -> tuple[int, ...]:
        while self.host.num_free < count:
            _, job = self._clean.popitem(last=False)
            self._clean_slots -= len(job.host.slots)
            self._free_host(job)
        return self.host.take(count)

    def _unclean(self, job: Job) -> None:
        """The job leaves the device: its host copy is not the one to give up first any more."""
        if self._clean.pop(job.job_id, None) is not None:
            self._clean_slots -= len(job.host.slots)

    def _free_host(self, job: Job, keep: int = 0) -> None:
        slots = job.host.slots[keep:]
        if not slots:
            return
        self.host.give_back(slots)
        self._said.append(FreeHost(job.job_id, slots))
        job.host = HostCopy(job.host.slots[:keep], keep * self.pool.block_size)

    def _move(self, job: Job, after: KvState) -> None:
        if (job.kv, after) not in KV_MOVES:
            raise InvalidTransition(job.job_id, job.kv, after, self._history.of(job.job_id))
        self.residency.moves(job, after, self.now_ns)
        job.kv = after

    def _record(self, job: Job, happening: Happening, detail: int) -> None:
        self._history.record(self.now_ns, job.job_id, happening, detail)

    def clean_jobs(self) -> tuple[Job, ...]:
        return tuple(self._clean.values())
