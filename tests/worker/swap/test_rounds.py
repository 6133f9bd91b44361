"""A thousand rounds of computing and swapping with times at random, every block's content known.

The stage is the worker's own (`EpochRun`, its threads, its copies) over a real KV pool; only what it computes is made
up: a row writes a number for each (job, layer, position) into its blocks, after it has read back all that the job wrote
before. Freed blocks are given away again at once. Any copy that comes too early, too late or to the wrong place shows
as a wrong number, or as a checksum that does not match.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Iterator

import numpy as np

from fastserve.v1 import stage_pb2
from fastserve_common.packed import pack_u32, unpack_u32
from fastserve_worker.backend import BlockMemory, CopyBlock, Turn
from fastserve_worker.engine import KvPool
from fastserve_worker.epoch import EpochRun
from fastserve_worker.messages import (
    Activations,
    KvShape,
    Plan,
    PlanRow,
    ProfilePoint,
    StageInfo,
    StageOutput,
    SwapOrder,
)
from fastserve_worker.runner import StageRunner
from fastserve_worker.sampling.params import TokenDraw
from fastserve_worker.swap.copier import Copier
from fastserve_worker.swap.host_slab import HostSlab
from fastserve_worker.swap.torch_blocks import blocks_of

NUM_ROUNDS = 1000
NUM_BLOCKS, NUM_SLOTS, BLOCK_SIZE, NUM_LAYERS = 24, 64, 4, 2
MAX_LENGTH = 24
NUM_JOBS = 8
MAX_DELAY_S = 0.0004


class DelayedMemory:
    """Waits at random before a copy and between its blocks."""

    def __init__(self, inner: BlockMemory, rng: random.Random) -> None:
        self._inner = inner
        self._rng = rng

    @property
    def shape(self) -> KvShape:
        return self._inner.shape

    def attach(self, slab: HostSlab) -> None:
        self._inner.attach(slab)

    @contextlib.contextmanager
    def copies(self, order: SwapOrder) -> Iterator[CopyBlock]:
        with self._inner.copies(order) as copy_block:

            def late(block: int, slot: memoryview) -> None:
                time.sleep(self._rng.random() * MAX_DELAY_S)
                copy_block(block, slot)

            yield late


class PatternStage:
    """A backend whose KV is numbers that can be told apart."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._pool = KvPool(
            num_blocks=NUM_BLOCKS, num_layers=NUM_LAYERS, num_kv_heads=1, head_dim=8, block_size=BLOCK_SIZE
        )
        self.memory = DelayedMemory(blocks_of(self._pool, self._pool.block_bytes), rng)
        self.info = StageInfo(
            stage=0,
            num_stages=1,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_model_len=MAX_LENGTH,
            vocab_size=100,
            fingerprint="pattern",
            kv_block_bytes=self._pool.block_bytes,
            device="cpu",
            dtype="float32",
            hidden_size=1,
            hidden_dtype="float32",
        )

    def start_epoch(self, epoch: int) -> None: ...

    def run(self, plan: Plan, activations: Activations | None) -> StageOutput:
        for row in plan.rows:
            self._read(row)
        time.sleep(self._rng.random() * MAX_DELAY_S)
        for row in plan.rows:
            self._write(row)
        return StageOutput(1, draws=(TokenDraw(1),) * len(plan.rows))

    def profile(self, point: ProfilePoint, turn: Turn) -> int:
        return 1

    def _read(self, row: PlanRow) -> None:
        table = unpack_u32(row.block_table)
        for layer in range(NUM_LAYERS):
            for position in range(row.start):
                found = self._at(layer, table[position // BLOCK_SIZE], position)
                if not (found == _number(row.job_id, layer, position)).all():
                    raise AssertionError(f"job {row.job_id}, layer {layer}, position {position}: {found[0]}")

    def _write(self, row: PlanRow) -> None:
        table = unpack_u32(row.block_table)
        for layer in range(NUM_LAYERS):
            for position in range(row.start, row.start + row.num_tokens):
                self._at(layer, table[position // BLOCK_SIZE], position)[:] = _number(row.job_id, layer, position)

    def _at(self, layer: int, block: int, position: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        """Keys of one position; a view."""
        keys: np.ndarray[tuple[int], np.dtype[np.float32]] = self._pool.keys(layer).numpy()[
            block, 0, :, position % BLOCK_SIZE
        ]
        return keys


def _number(job_id: int, layer: int, position: int) -> float:
    return float(job_id * 1000 + layer * 100 + position)


class _Job:
    def __init__(self, job_id: int) -> None:
        self.job_id = job_id
        self.length = 0
        self.table: list[int] = []
        self.slots: list[int] = []
        #: device, out, host, in
        self.place = "device"
        self.in_flight = False


class Scheduler:
    """Orders swaps as the real one does, only without sense. At most one plan in flight per job."""

    def __init__(self, run: EpochRun, rng: random.Random) -> None:
        self._run = run
        self._rng = rng
        self._seq = 0
        self._swap_id = 0
        self._next_job = 0
        self._blocks = list(range(NUM_BLOCKS))
        self._slots = list(range(NUM_SLOTS))
        self._jobs: list[_Job] = []
        self._plans: dict[int, list[_Job]] = {}
        self._swaps: dict[int, _Job] = {}
        self.moves = 0

    @property
    def is_idle(self) -> bool:
        return not self._plans and not self._swaps

    def round(self) -> None:
        """One plan: some jobs go on, some leave right after they were computed, some come back right before."""
        while len(self._jobs) < NUM_JOBS:
            self._next_job += 1
            self._jobs.append(_Job(self._next_job))
        plan = stage_pb2.IterationPlan(seq=self._seq, epoch=1)
        self._seq += 1
        jobs = self._rng.sample(self._jobs, NUM_JOBS)
        leaving = [job for job in jobs if job.place == "device" and job.length and self._rng.random() < 0.3]
        for job in leaving:
            self._leave(job, plan)
        for job in jobs:
            if job.place == "host" and not job.in_flight and len(self._blocks) >= len(job.slots):
                self._come_back(job, plan)
            if job.place in ("device", "in") and not job.in_flight and self._rng.random() < 0.6:
                self._go_on(job, plan)
        self._plans[plan.seq] = [job for job in jobs if job.job_id in {item.job_id for item in plan.items}]
        self._run.take_plan(plan)

    def hear(self, message: stage_pb2.StageMessage) -> None:
        assert not message.HasField("fault"), message.fault.message
        if message.HasField("iteration"):
            for job in self._plans.pop(message.iteration.seq):
                job.in_flight = False
                if job.length == MAX_LENGTH and job.place == "device":
                    self._jobs.remove(job)
                    self._blocks.extend(job.table)
            return
        assert not message.swap.error, message.swap.error
        job = self._swaps.pop(message.swap.swap_id)
        self.moves += 1
        if job.place == "out":
            self._blocks.extend(job.table)
            job.place, job.table = "host", []
        else:
            self._slots.extend(job.slots)
            job.place, job.slots = "device", []

    def _leave(self, job: _Job, plan: stage_pb2.IterationPlan) -> None:
        """Also while a plan that came before computes it: the copy has to wait for that one."""
        if len(self._slots) >= len(job.table):
            job.place, job.slots = "out", [self._slots.pop() for _ in job.table]
            self._swap(job, stage_pb2.SWAP_DIRECTION_OUT, plan)

    def _come_back(self, job: _Job, plan: stage_pb2.IterationPlan) -> None:
        job.place, job.table = "in", [self._blocks.pop() for _ in job.slots]
        self._swap(job, stage_pb2.SWAP_DIRECTION_IN, plan)

    def _swap(self, job: _Job, direction: "stage_pb2.SwapDirection.ValueType", plan: stage_pb2.IterationPlan) -> None:
        self._swap_id += 1
        self._swaps[self._swap_id] = job
        plan.swaps.add(
            swap_id=self._swap_id,
            job_id=job.job_id,
            direction=direction,
            device_blocks=pack_u32(job.table),
            host_slots=pack_u32(job.slots),
        )

    def _go_on(self, job: _Job, plan: stage_pb2.IterationPlan) -> None:
        num_tokens = min(self._rng.randint(1, 6), MAX_LENGTH - job.length)
        num_blocks = -(-(job.length + num_tokens) // BLOCK_SIZE) - len(job.table)
        if not num_tokens or len(self._blocks) < num_blocks:
            return
        job.table += [self._blocks.pop() for _ in range(num_blocks)]
        plan.items.add(
            job_id=job.job_id,
            start=job.length,
            num_tokens=num_tokens,
            block_table=pack_u32(job.table),
            token_ids=pack_u32([1] * num_tokens),
            sample=True,
        )
        job.length += num_tokens
        job.in_flight = True


async def test_a_thousand_rounds_at_random() -> None:
    rng = random.Random(20)
    stage, runner = PatternStage(rng), StageRunner()
    copier = Copier(stage.memory)
    slab = HostSlab.private(NUM_SLOTS, stage.info.kv_block_bytes, checksums=True)
    messages: asyncio.Queue[stage_pb2.StageMessage] = asyncio.Queue()
    run = EpochRun(
        1,
        backend=stage,
        runner=runner,
        copier=copier,
        host=lambda: slab,
        next_address="",
        report=messages.put_nowait,
    )
    scheduler = Scheduler(run, rng)
    for _ in range(NUM_ROUNDS):
        scheduler.round()
        for _ in range(rng.randint(1, 3)):  # up to three plans in flight
            scheduler.hear(await messages.get())
            if scheduler.is_idle:
                break
    while not scheduler.is_idle:
        scheduler.hear(await messages.get())
    run.abandon()
    await run.wait_closed()
    assert await copier.close(10)
    assert await runner.close(10)
    assert scheduler.moves > NUM_ROUNDS / 2
