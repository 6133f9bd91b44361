"""A real arena: attached to, used by stages side by side, lost and found again."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fastserve_common.segments import attach
from fastserve_common.state import SqliteState
from fastserve_worker.codec import attach_request
from fastserve_worker.fake_stage import FakeStage, fake_answer
from fastserve_worker.service import StageServer
from fastserve_worker.settings import WorkerSettings
from fastserve_worker.swap import arena_map
from fastserve_worker.swap.arena_map import HostLink
from fastserve_worker.swap.host_slab import TRAILER_BYTES
from fastserve_worker.worker import run_worker

from .rig import IN, NODE, OUT, Pipeline, Swapper, kvstore

PROMPT = list(range(100, 140))
FAKE_BLOCK_BYTES = 64
ARENA_BYTES = 8192


@pytest.fixture
async def state(tmp_path: Path) -> AsyncIterator[SqliteState]:
    store = SqliteState(tmp_path / "state.db")
    yield store
    await store.close()


def link(state: SqliteState, server: StageServer, *, checksums: bool = False) -> HostLink:
    assert server.stage is not None
    shape = server.stage.copier.memory.shape
    return HostLink(state, NODE, server.stage.info, shape, checksums=checksums, use=server.attach_host)


@contextlib.asynccontextmanager
async def fakes_on_arena(
    state: SqliteState, num_stages: int, *, checksums: bool = False
) -> AsyncIterator[tuple[Swapper, list[HostLink]]]:
    async with contextlib.AsyncExitStack() as stack:
        links, addresses = [], []
        for stage in range(num_stages):
            server = StageServer()
            addresses.append(f"127.0.0.1:{await server.start('127.0.0.1:0')}")
            stack.push_async_callback(server.stop, 0.2)
            backend = FakeStage(stage=stage, num_stages=num_stages)
            await server.load(lambda backend=backend: backend)  # type: ignore[misc]  # mypy sees no default argument
            links.append(link(state, server, checksums=checksums))
            await links[-1].refresh()
        yield Swapper(await stack.enter_async_context(Pipeline(addresses))), links


@pytest.mark.parametrize("checksums", [False, True])
async def test_stages_share_an_arena(state: SqliteState, *, checksums: bool) -> None:
    async with kvstore(state, ARENA_BYTES) as store, fakes_on_arena(state, 2, checksums=checksums) as (swapper, _):
        slot_bytes = FAKE_BLOCK_BYTES + (TRAILER_BYTES if checksums else 0)
        readies = await swapper.pipeline.raise_epoch()
        assert {(r.num_host_slots, r.host_generation, r.host_node) for r in readies} == {
            (ARENA_BYTES // (2 * slot_bytes), store.generation, NODE)
        }
        swapper.generation = store.generation
        job = swapper.pipeline.job(PROMPT, 4)
        await swapper.run([job])
        await swapper.run([], swapper.op(OUT, job.job_id, job.table, [3, 0, 5]))
        job.table = [200, 201, 202]
        reports = await swapper.run([], swapper.op(IN, job.job_id, job.table, [3, 0, 5]))
        assert [report.error for report in reports] == ["", ""]
        assert await swapper.pipeline.generate([job], 4) == [fake_answer(PROMPT, 4)]


async def test_damage_on_the_host_is_reported_not_computed_with(state: SqliteState) -> None:
    async with kvstore(state, ARENA_BYTES), fakes_on_arena(state, 1, checksums=True) as (swapper, _):
        await swapper.run([], swapper.op(OUT, 7, [1, 2], [4, 5]))
        (member,) = (await state.members("kvstore")).values()
        with attach(member["segment"]) as memory:
            memory[5 * (FAKE_BLOCK_BYTES + TRAILER_BYTES)] ^= 1
        (intact,) = await swapper.run([], swapper.op(IN, 7, [10], [4]))
        (damaged,) = await swapper.run([], swapper.op(IN, 7, [11], [5]))
        (foreign,) = await swapper.run([], swapper.op(IN, 8, [12], [4]))
        assert intact.error == ""
        assert damaged.error.startswith("checksum mismatch in host slot 5")
        assert foreign.error.startswith("checksum mismatch in host slot 4: it holds a block of job 7")
        assert damaged.bytes == foreign.bytes == 0


async def test_a_kvstore_that_is_started_again_takes_the_place_of_the_old_one(state: SqliteState) -> None:
    async with fakes_on_arena(state, 1) as (swapper, (host_link,)):
        (ready,) = await swapper.pipeline.raise_epoch()
        assert ready.num_host_slots == 0
        client = swapper.pipeline.first
        async with kvstore(state, ARENA_BYTES, start_number=1) as store:
            await host_link.refresh()
            told = (await client.answer("host")).host
            assert (told.num_slots, told.generation, told.node) == (ARENA_BYTES // 64, store.generation, NODE)
            swapper.generation = store.generation
            job = swapper.pipeline.job(PROMPT, 4)
            await swapper.run([job])
            await swapper.run([], swapper.op(OUT, job.job_id, job.table, [0, 1, 2]))
        await host_link.refresh()  # it is gone, and what it gave can still be read
        job.table = [200, 201, 202]
        (report,) = await swapper.run([], swapper.op(IN, job.job_id, job.table, [0, 1, 2]))
        assert report.error == ""
        async with kvstore(state, ARENA_BYTES // 2, start_number=2) as store:
            await host_link.refresh()
            told = (await client.answer("host")).host
            assert (told.num_slots, told.generation) == (ARENA_BYTES // 128, store.generation)
            (stale,) = await swapper.run([], swapper.op(IN, job.job_id, [210, 211, 212], [0, 1, 2]))
            assert stale.error.startswith(f"host memory is of generation {store.generation}")
            swapper.generation = store.generation
            await swapper.run([], swapper.op(OUT, job.job_id, job.table, [7, 8, 9]))
            job.table = [220, 221, 222]
            await swapper.run([], swapper.op(IN, job.job_id, job.table, [7, 8, 9]))
            await host_link.refresh()  # says nothing: it is the same one
            assert await swapper.pipeline.generate([job], 4) == [fake_answer(PROMPT, 4)]


async def test_an_arena_too_small_is_said_once_and_looked_at_again(
    state: SqliteState, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fakes_on_arena(state, 1) as (_, (host_link,)):
        host_link._request = attach_request(FakeStage().info, FakeStage(block_size=4096).memory.shape, trailer_bytes=0)
        with caplog.at_level(logging.WARNING):
            async with kvstore(state, ARENA_BYTES):
                await host_link.refresh()
                await host_link.refresh()
                await state.register("kvstore", NODE, {"generation": "1"})
                await host_link.refresh()
        complaints = [r.getMessage() for r in caplog.records if "no host memory" in r.getMessage()]
        assert len(complaints) == 2
        assert "set --host-kv-memory to at least" in complaints[0]
        assert "address" in complaints[1]


async def test_a_worker_attaches_by_itself(tmp_path: Path, state: SqliteState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_map, "ATTACH_POLL_S", 0.01)
    settings = WorkerSettings.model_validate(
        {"state": f"sqlite://{tmp_path}/state.db", "fake": True, "node": NODE, "kv_checksums": True}
    )
    stop = asyncio.Event()
    async with kvstore(state, ARENA_BYTES, start_number=1) as first:
        running = asyncio.create_task(run_worker(settings, stop))
        async with asyncio.timeout(20):
            while not (members := await state.members("stage")):  # noqa: ASYNC110 - the store tells nobody
                await asyncio.sleep(0.01)
        pipeline = Pipeline([members["stage-0"]["address"]])
        (ready,) = await pipeline.raise_epoch()
        assert (ready.host_generation, ready.num_host_slots) == (first.generation, ARENA_BYTES // (64 + TRAILER_BYTES))
    async with kvstore(state, ARENA_BYTES, start_number=2) as second:
        assert (await pipeline.first.answer("host")).host.generation == second.generation
    await pipeline.first.aclose()
    stop.set()
    assert await running == 0
