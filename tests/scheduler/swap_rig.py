"""A whole scheduler over stages that really swap: the worker's own, torch-free, with a real kvstore's memory."""

import asyncio
import contextlib
import random
import threading
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from fastserve_common.state import StateStore, membership
from fastserve_kvstore import settings as kvstore_settings
from fastserve_scheduler import driver, kv_link
from fastserve_scheduler.core import CoreConfig
from fastserve_scheduler.messages import Ready
from fastserve_scheduler.settings import SchedulerSettings
from fastserve_worker.backend import CopyBlock
from fastserve_worker.fake_stage import FakeBlocks, FakeOptions, FakeStage, FakeStageServer, fake_answer
from fastserve_worker.messages import SwapDirection, SwapOrder
from fastserve_worker.swap import arena_map
from fastserve_worker.swap.arena_map import HostLink
from fastserve_worker.swap.host_slab import TRAILER_BYTES, HostSlab

from .host import NODE, KvStore
from .rig import Answer, Cluster, TestGateway, until_async

BLOCK_SIZE = 4
#: Bytes of a block on one fake stage.
BLOCK_BYTES = 4 * BLOCK_SIZE


def be_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes back is found at once, tiny arenas are allowed."""
    monkeypatch.setattr(arena_map, "ATTACH_POLL_S", 0.05)
    monkeypatch.setattr(kv_link, "FIRST_BACKOFF_S", 0.05)
    monkeypatch.setattr(driver, "PROGRESS_CHECK_S", 0.05)
    monkeypatch.setattr(kvstore_settings, "MIN_ARENA_BYTES", 1)


@dataclass
class SwapScript:
    """What copies there were, and which ones wait. One for all lives of all stages."""

    begun: list[SwapOrder] = field(default_factory=list)
    #: The request that a test is about, by its number in the core; "it".
    it: int = 1
    #: Copies of this job in this direction wait at their beginning.
    held: tuple[int, SwapDirection] | None = None
    let_go: threading.Event = field(default_factory=threading.Event)

    def hold(self, job_id: int, direction: SwapDirection) -> None:
        self.held = job_id, direction
        self.let_go.clear()

    def release(self) -> None:
        self.held = None
        self.let_go.set()

    def has_begun(self, job_id: int, direction: SwapDirection) -> bool:
        return any((order.job_id, order.direction) == (job_id, direction) for order in tuple(self.begun))


class WatchedBlocks(FakeBlocks):
    """The fake stage's blocks under a script."""

    def __init__(self, stage: FakeStage, script: SwapScript) -> None:
        super().__init__(stage)
        self._script = script

    @contextlib.contextmanager
    def copies(self, order: SwapOrder) -> Iterator[CopyBlock]:
        self._script.begun.append(order)
        if self._script.held == (order.job_id, order.direction):
            self._script.let_go.wait()
        with super().copies(order) as copy_block:
            yield copy_block


class TightSettings(SchedulerSettings):
    """Requests displace each other however small the pool is."""

    def core_config(self, stages: Sequence[Ready]) -> CoreConfig:
        return replace(super().core_config(stages), swap_min_batches=0)


class SwapStage(FakeStageServer):
    """Attached to the node's kvstore, as a worker process is."""

    def __init__(self, store: StateStore, backend: FakeStage, *, checksums: bool = False) -> None:
        super().__init__(backend)
        self._link = HostLink(store, NODE, backend.info, backend.memory.shape, checksums=checksums, use=self._use)
        self._linked: asyncio.Task[None] | None = None

    async def _use(self, slab: HostSlab) -> None:
        assert self.stage is not None
        self.stage.use_host(slab)

    async def __aenter__(self) -> "SwapStage":
        await super().__aenter__()
        await self._link.refresh()
        self._linked = asyncio.create_task(self._link.run())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._linked is not None
        self._linked.cancel()
        await asyncio.gather(self._linked, return_exceptions=True)
        await super().__aexit__(*exc_info)


class SwapCluster(Cluster):
    """`num_slots` 0: the node has no kvstore. On exit blocks, slots and the kvstore's ledger must be clean.

    `tight`: swap also in a pool of less than two running batches.
    """

    def __init__(
        self,
        folder: Path,
        num_stages: int,
        *,
        num_blocks: int,
        num_slots: int,
        block_size: int = BLOCK_SIZE,
        options: FakeOptions | None = None,
        flags: Sequence[str] = (),
        checksums: bool = False,
        tight: bool = False,
    ) -> None:
        super().__init__(folder, num_stages, flags=flags)
        self.options = options or FakeOptions(iteration_ns=200_000, token_ns=1_000)
        self.num_slots = num_slots
        self.stages: list[FakeStage | None] = [None] * num_stages
        self.script = SwapScript()
        self._num_blocks, self._block_size = num_blocks, block_size
        self._checksums, self._tight = checksums, tight
        #: On one stage.
        self.slot_bytes = 4 * block_size + (TRAILER_BYTES if checksums else 0)
        self.kvstore = KvStore(self.url, self.store, max(1, num_slots) * self.slot_bytes * num_stages)
        self._exits = [contextlib.AsyncExitStack() for _ in range(num_stages)]

    def settings(self, *flags: str) -> SchedulerSettings:
        kind = TightSettings if self._tight else SchedulerSettings
        return kind.load([*self.flags, *flags], prog="test")

    async def start_stage(self, stage: int, *, attached: bool = True) -> None:
        fake = FakeStage(
            stage=stage,
            num_stages=len(self.stages),
            num_blocks=self._num_blocks,
            block_size=self._block_size,
            max_model_len=512,
            options=self.options,
        )
        fake.memory = WatchedBlocks(fake, self.script)
        self.stages[stage] = fake
        served = SwapStage(self.store, fake, checksums=self._checksums) if attached else FakeStageServer(fake)
        server = await self._exits[stage].enter_async_context(served)
        info = {"address": server.address, "incarnation": uuid.uuid4().hex}
        await self._exits[stage].enter_async_context(membership(self.store, "stage", f"stage-{stage}", info))

    async def kill_stage(self, stage: int) -> None:
        """Its streams break, its blocks are gone; the host's slots are not its own."""
        self.script.release()
        await self._exits[stage].aclose()
        self.stages[stage] = None

    def compute(self, going: bool) -> None:
        """Whether the stages' threads take plans."""
        for fake in self.stages:
            if fake is not None:
                (fake.gate.set if going else fake.gate.clear)()

    async def __aenter__(self) -> "SwapCluster":
        if self.num_slots:
            await self.kvstore.start()
        for stage in range(len(self.stages)):
            await self.start_stage(stage)
        await self.start_scheduler()
        if self.num_slots:
            await self.until_granted()
        return self

    async def until_granted(self) -> None:
        async def granted() -> bool:
            return (await self.state()).host_blocks_total == self.num_slots

        await self.gateway("first")
        await until_async(granted)

    async def ledger_is_clean(self) -> bool:
        state = await self.state()
        host_is_clean = state.swapped == 0 and state.host_blocks_free == state.host_blocks_total
        return host_is_clean and await super().ledger_is_clean()

    async def has_no_slots(self) -> bool:
        return (await self.state()).host_blocks_total == 0

    async def something_is_committed(self) -> bool:
        return not await self.nothing_is_committed()

    async def nothing_is_committed(self) -> bool:
        return (await self.kvstore.status()).committed_slots == 0

    async def stop_stages(self) -> None:
        for stage in range(len(self.stages)):
            await self.kill_stage(stage)
        await self.kvstore.kill()
        await super().stop_stages()

    async def __aexit__(self, *exc_info: object) -> None:
        self.script.release()
        self.compute(True)
        try:
            if exc_info[0] is None and self.num_slots and not self.schedulers[-1].task.done():
                await until_async(self.ledger_is_clean)
                await until_async(self.nothing_is_committed)
        except BaseException as error:
            await super().__aexit__(type(error), error, error.__traceback__)
            raise
        await super().__aexit__(*exc_info)


def random_swaps(rng: random.Random, num_swaps: int = 2000, longest_ns: int = 4_000_000) -> dict[int, int]:
    """A time of its own for each swap; most are short."""
    return {swap_id: int(longest_ns * rng.random() ** 4) for swap_id in range(num_swaps)}


async def ask(
    gateway: TestGateway, number: int, prompt_tokens: int, num_tokens: int, *, priority: int = 0
) -> tuple[Answer, list[int]]:
    """The answer to be, and what it must become."""
    prompt = [number + 1, *range(prompt_tokens - 1)]
    answer = await gateway.submit(prompt, num_tokens, request_id=f"{number}", priority=priority)
    return answer, fake_answer(prompt, num_tokens)
