"""Swaps in plans, over gRPC, on stages that draw a wrong token for every wrong block."""

import asyncio
from collections.abc import Callable

import pytest

from fastserve.v1 import stage_pb2
from fastserve_common.packed import pack_u32
from fastserve_worker.fake_stage import FakeOptions, FakeStageServer, fake_answer
from fastserve_worker.messages import SwapDirection
from fastserve_worker.swap import orders

from .rig import IN, OUT, Heard, Swapper, apply, swapping_fakes

PROMPT = list(range(100, 140))
MS = 1_000_000


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - threads tell nobody
            await asyncio.sleep(0.001)


def poison(server: FakeStageServer, blocks: list[int]) -> None:
    for block in blocks:
        server.backend.block_bytes(block)[:] = b"\xee" * server.backend.info.kv_block_bytes


@pytest.mark.parametrize("num_stages", [1, 3])
async def test_a_job_moves_between_any_two_tokens(num_stages: int) -> None:
    async with swapping_fakes(num_stages, num_host_slots=8) as (swapper, servers):
        moved, mate = swapper.pipeline.job(PROMPT, 12), swapper.pipeline.job([50, 51], 12)
        homes = [moved.table, list(range(100, 100 + len(moved.table)))]
        await swapper.run([moved, mate])
        for position in range(11):
            slots = [(position + i) % 8 for i in range(len(moved.table))]
            reports = await swapper.run([mate], swapper.op(OUT, moved.job_id, moved.table, slots))
            assert {(r.stage, r.error) for r in reports} == {(stage, "") for stage in range(num_stages)}
            assert all(r.bytes == len(slots) * 64 and r.copy_ns > 0 for r in reports)
            for server in servers:
                poison(server, moved.table)
            moved.table = homes[(position + 1) % 2]
            await swapper.run([], swapper.op(IN, moved.job_id, moved.table, slots))
            await swapper.run([moved])
    assert moved.output == fake_answer(PROMPT, 12)
    assert mate.output == fake_answer([50, 51], 12)


@pytest.mark.parametrize("num_stages", [1, 2])
async def test_a_block_leaves_after_it_has_been_computed(num_stages: int) -> None:
    """The plan that writes the block is held at the last stage while a later one orders it out."""
    async with swapping_fakes(num_stages, num_host_slots=8) as (swapper, servers):
        last, client = servers[-1], swapper.pipeline.last
        last.backend.gate.clear()
        job = swapper.pipeline.job(PROMPT, 4)
        item = job.item()
        await swapper.send([item])
        await until(lambda: last.backend.plans_seen == 1)
        out = swapper.op(OUT, job.job_id, job.table, [0, 1, 2])
        other = swapper.op(IN, 77, [200, 201], [5, 6])
        await swapper.send([], out, other)
        heard = await Heard().until(client, num_swaps=1)
        assert set(heard.swaps) == {other.swap_id}  # in at once, past the plan that computes
        last.backend.gate.set()
        await heard.until(client, 2, 2)
        apply([job], [item], heard.iterations[0])
        for other_client in swapper.pipeline.clients[:-1]:
            await Heard().until(other_client, 2, 2)
        for server in servers:
            poison(server, job.table)
        job.table = [220, 221, 222]
        await swapper.run([job], swapper.op(IN, job.job_id, job.table, [0, 1, 2]))
        await swapper.pipeline.generate([job], 4)
    assert job.output == fake_answer(PROMPT, 4)


async def test_a_plan_waits_for_the_blocks_that_it_computes_with_and_for_no_others() -> None:
    slow = {2: 300 * MS, 3: 300 * MS}
    async with swapping_fakes(2, num_host_slots=8, options=FakeOptions(swap_delays_ns=slow)) as (swapper, servers):
        job, mate = swapper.pipeline.job(PROMPT, 4), swapper.pipeline.job([60], 4)
        await swapper.run([job, mate])
        await swapper.run([], swapper.op(OUT, job.job_id, job.table, [0, 1, 2]))
        assert swapper.swap_id == 1
        for server in servers:
            poison(server, job.table)
        job.table = [220, 221, 222]
        coming = swapper.op(IN, job.job_id, job.table, [0, 1, 2])
        items = [mate.item()]
        await swapper.send(items, coming)
        heard = await Heard().until(swapper.pipeline.last, num_iterations=1)
        assert not heard.swaps  # the mate has its token while the copy is on its way
        await swapper.send([job.item()])
        await heard.until(swapper.pipeline.last, 2, 1)
        assert int.from_bytes(heard.iterations[1].token_ids, "little") == fake_answer(PROMPT, 2)[1]
        assert all(server.stage is not None and server.stage.copier.blocked_ns > 0 for server in servers)


async def test_a_job_that_gets_a_block_while_an_old_copy_still_writes_it_waits_too() -> None:
    """As when the host store falls: its swaps are void for the scheduler, the copies are still under way."""
    options = FakeOptions(swap_delays_ns={1: 200 * MS})
    async with swapping_fakes(2, num_host_slots=8, options=options) as (swapper, _):
        heir = swapper.pipeline.job(PROMPT, 3)
        await swapper.send([], swapper.op(IN, 99, heir.table, [0, 1, 2]))
        await swapper.send([heir.item()])
        heard = await Heard().until(swapper.pipeline.last, 2, 1)
        assert int.from_bytes(heard.iterations[1].token_ids, "little") == fake_answer(PROMPT, 1)[0]
        await Heard().until(swapper.pipeline.first, 2, 1)
        heir.computed, heir.output = len(PROMPT), fake_answer(PROMPT, 1)
        assert await swapper.pipeline.generate([heir], 3) == [fake_answer(PROMPT, 3)]


async def test_both_directions_are_under_way_at_once() -> None:
    async with swapping_fakes(1, num_host_slots=8) as (swapper, (server,)):
        assert server.stage is not None
        counters = server.stage.copier.counters
        server.backend.swap_gate.clear()
        await swapper.send([], swapper.op(OUT, 1, [1], [1]), swapper.op(IN, 2, [2], [2]))
        heard = await Heard().until(swapper.pipeline.first, num_iterations=1)  # not held by the copies
        await until(lambda: [counters[d].in_flight for d in SwapDirection] == [1, 1])
        server.backend.swap_gate.set()
        await heard.until(swapper.pipeline.first, num_swaps=2)
        assert [(c.in_flight, c.finished, c.failed, c.num_bytes) for c in counters.values()] == [(0, 1, 0, 64)] * 2


async def test_an_epoch_change_drops_copies_and_waits_for_the_one_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A late copy would land in a block that the new epoch has given to another job."""
    async with swapping_fakes(1, num_host_slots=8) as (swapper, (server,)):
        assert server.stage is not None
        client, counters = swapper.pipeline.first, server.stage.copier.counters
        old = swapper.pipeline.job(PROMPT, 4)
        await swapper.run([old])
        await swapper.run([], swapper.op(OUT, old.job_id, old.table, [0, 1, 2]))
        server.backend.swap_gate.clear()
        await swapper.send([], *(swapper.op(IN, old.job_id, [10 + i], [i]) for i in range(3)))
        await Heard().until(client, num_iterations=1)
        begun_with: list[int] = []
        start_epoch = server.backend.start_epoch

        def begin(epoch: int) -> None:
            begun_with.append(counters[SwapDirection.IN].in_flight)
            start_epoch(epoch)

        monkeypatch.setattr(server.backend, "start_epoch", begin)
        await client.send_configure(2)
        await until(lambda: server.stage is not None and server.stage.epoch == 2)
        for _ in range(100):  # time enough to go on without waiting for the copies
            await asyncio.sleep(0)
        assert counters[SwapDirection.IN].in_flight == 3
        server.backend.swap_gate.set()
        assert (await client.answer("ready")).ready.epoch == 2  # no report of the old epoch before it
        assert begun_with == [0]
        assert counters[SwapDirection.IN].num_bytes == 0
        swapper.pipeline.epoch = 2
        heir = swapper.pipeline.job([70] * 30, 4)
        heir.table = [10, 11, 12]
        assert await swapper.pipeline.generate([heir], 4) == [fake_answer([70] * 30, 4)]
        again = swapper.pipeline.job(PROMPT, 4)  # what was committed on the host is still there
        again.computed, again.table, again.output = old.computed, [30, 31, 32], list(old.output)
        await swapper.run([again], swapper.op(IN, old.job_id, again.table, [0, 1, 2]))
        assert await swapper.pipeline.generate([again], 4) == [fake_answer(PROMPT, 4)]


async def test_a_fault_ends_the_swaps_of_its_epoch() -> None:
    async with swapping_fakes(1, 8, FakeOptions(fault_on=frozenset({1}))) as (swapper, (server,)):
        job = swapper.pipeline.job(PROMPT, 4)
        server.backend.gate.clear()
        await swapper.send([job.item()])
        await swapper.send([], swapper.op(OUT, job.job_id, job.table, [0, 1, 2]))
        server.backend.gate.set()
        assert "ordered to fail" in (await swapper.pipeline.first.fault()).message
        await swapper.pipeline.raise_epoch()
        assert server.stage is not None
        assert server.stage.copier.counters[SwapDirection.OUT].finished == 0  # the block was never right


async def test_errors_are_reported_and_a_plan_that_needs_the_blocks_is_a_fault() -> None:
    options = FakeOptions(failed_swaps={1: "ordered to fail"}, lost_swaps=frozenset({2}))
    async with swapping_fakes(1, 8, options) as (swapper, (server,)):
        swapper.generation = 1
        (failed,) = await swapper.run([], swapper.op(OUT, 1, [1], [1]))
        assert (failed.error, failed.bytes) == ("ordered to fail", 0)
        await swapper.send([], swapper.op(OUT, 1, [1], [1]))  # carried out, but nobody hears of it
        await swapper.pipeline.first.answer("iteration")
        (far,) = await swapper.run([], swapper.op(OUT, 1, [1], [8]))
        assert "host slot 8 is not one of 8" in far.error
        server.replace_host(4)
        heard = await swapper.pipeline.first.answer("host")
        assert (heard.host.generation, heard.host.num_slots) == (2, 4)
        (old,) = await swapper.run([], swapper.op(IN, 1, [1], [1]))
        assert "generation 2, the swap of 1" in old.error
        job = swapper.pipeline.job(PROMPT, 1)
        await swapper.send([job.item()], swapper.op(IN, job.job_id, job.table[:1], [1]))
        assert "computes with blocks of swap 5" in (await _fault(swapper)).message


async def _fault(swapper: Swapper) -> stage_pb2.StageFault:
    while (message := await swapper.pipeline.first.answer()).WhichOneof("message") != "fault":
        assert message.WhichOneof("message") in ("swap", "iteration")
    return message.fault


async def test_without_host_memory_swaps_fail_and_all_else_works() -> None:
    async with swapping_fakes(1, num_host_slots=0) as (swapper, _):
        (ready,) = await swapper.pipeline.raise_epoch()
        assert (ready.num_host_slots, ready.host_generation) == (0, 0)
        job = swapper.pipeline.job(PROMPT, 3)
        (report,) = await swapper.run([job], swapper.op(OUT, 9, [200], [0]))
        assert "attached to no host memory" in report.error
        assert await swapper.pipeline.generate([job], 3) == [fake_answer(PROMPT, 3)]


def _no_direction(plan: stage_pb2.IterationPlan) -> None:
    plan.swaps[0].direction = stage_pb2.SWAP_DIRECTION_UNSPECIFIED


def _fewer_slots(plan: stage_pb2.IterationPlan) -> None:
    plan.swaps[0].host_slots = b""


def _torn_id(plan: stage_pb2.IterationPlan) -> None:
    plan.swaps[0].device_blocks = plan.swaps[0].host_slots = b"12345"


def _foreign_block(plan: stage_pb2.IterationPlan) -> None:
    plan.swaps[0].device_blocks = pack_u32([256])


def _own_block(plan: stage_pb2.IterationPlan) -> None:
    plan.swaps[0].device_blocks = plan.items[0].block_table[:4]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_no_direction, "neither out nor in"),
        (_fewer_slots, "4 bytes of blocks, 0 of slots"),
        (_torn_id, "5 bytes of blocks"),
        (_foreign_block, "outside the pool of 256"),
        (_own_block, "blocks that its own plan computes with"),
    ],
)
async def test_a_malformed_swap_is_a_fault_that_says_why(
    spoil: Callable[[stage_pb2.IterationPlan], None], message: str
) -> None:
    async with swapping_fakes(1, num_host_slots=8) as (swapper, _):
        plan = swapper.pipeline.plan([swapper.pipeline.job(PROMPT, 1).item()])
        plan.swaps.append(swapper.op(OUT, 1, [200], [0]))
        spoil(plan)
        await swapper.pipeline.first.send_plan(plan)
        assert message in (await swapper.pipeline.first.fault()).message


@pytest.mark.parametrize(
    ("limit", "value", "message"),
    [("MAX_OUTSTANDING_SWAPS", 2, "more than 2 swaps"), ("MAX_OUTSTANDING_POOLS", 0.01, "swaps of 3 blocks")],
)
async def test_unfinished_swaps_are_limited(
    monkeypatch: pytest.MonkeyPatch, limit: str, value: float, message: str
) -> None:
    monkeypatch.setattr(orders, limit, value)
    async with swapping_fakes(1, num_host_slots=8) as (swapper, (server,)):
        server.backend.swap_gate.clear()
        await swapper.send([], swapper.op(OUT, 1, [1], [1]), swapper.op(IN, 2, [2], [2]))
        await swapper.pipeline.first.answer("iteration")
        await swapper.send([], swapper.op(OUT, 3, [3], [3]))
        assert message in (await swapper.pipeline.first.fault()).message
