"""The service around a fake stage, over real gRPC: plans, epochs, faults, peers that die."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fastserve.v1 import stage_pb2, stage_pb2_grpc
from fastserve_common.channels import open_channel
from fastserve_common.packed import pack_u32
from fastserve_worker.fake_stage import FakeOptions, FakeStage, FakeStageServer, fake_answer
from fastserve_worker.service import LIVENESS, serve_in_process

from .rig import Pipeline, Sampling, StageClient

PROMPTS = [list(range(100, 100 + n)) for n in (1, 15, 16, 17, 70)]


@contextlib.asynccontextmanager
async def fakes(
    num_stages: int, options: FakeOptions | None = None, faulty: int = -1
) -> AsyncIterator[tuple[Pipeline, list[FakeStage]]]:
    """A running pipeline of fake stages; `options` go to stage `faulty`, or to all."""
    stages = [
        FakeStage(stage=i, num_stages=num_stages, options=options if faulty in (-1, i) else None)
        for i in range(num_stages)
    ]
    async with contextlib.AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(FakeStageServer(stage)) for stage in stages]
        pipeline = await stack.enter_async_context(Pipeline([server.address for server in servers]))
        yield pipeline, stages


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("max_tokens", [None, 7])
async def test_tokens_are_the_oracles_on_any_number_of_stages(num_stages: int, max_tokens: int | None) -> None:
    async with fakes(num_stages) as (pipeline, _):
        jobs = [pipeline.job(prompt, 20) for prompt in PROMPTS]
        answers = await pipeline.generate(jobs, 20, max_tokens)
    assert answers == [fake_answer(prompt, 20) for prompt in PROMPTS]


@pytest.mark.parametrize("num_stages", [1, 2, 4])
async def test_batches_without_a_draw_and_without_a_row(num_stages: int) -> None:
    async with fakes(num_stages) as (pipeline, _):
        job = pipeline.job(PROMPTS[-1], 3)
        item = job.item(16)
        report = await pipeline.run([item])
        assert report.token_ids == b""
        job.computed += 16
        report = await pipeline.run([])
        assert report.token_ids == b""
        assert await pipeline.generate([job], 3) == [fake_answer(PROMPTS[-1], 3)]


async def test_several_plans_in_flight_are_answered_in_order() -> None:
    async with fakes(3) as (pipeline, _):
        jobs = [pipeline.job(prompt, 1) for prompt in PROMPTS]
        plans = [pipeline.plan([job.item()]) for job in jobs]
        for plan in plans:
            await pipeline.first.send_plan(plan)
        for client in pipeline.clients:
            seqs = [(await client.answer("iteration")).iteration.seq for _ in plans]
            assert seqs == [plan.seq for plan in plans]


async def test_seeds_and_suppressed_ids_reach_the_last_stage() -> None:
    prompt = PROMPTS[1]
    kept_away = fake_answer(prompt, 1)
    async with fakes(2) as (pipeline, _):
        plain, seeded, kept = (
            pipeline.job(prompt, 4),
            pipeline.job(prompt, 4, Sampling(temperature=1, top_p=1, seed=-7, repetition_penalty=1.1)),
            pipeline.job(prompt, 4, suppressed=kept_away),
        )
        await pipeline.generate([plain, seeded, kept], 4)
    assert plain.output == fake_answer(prompt, 4)
    assert seeded.output == fake_answer(prompt, 4, seed=-7)
    assert kept.output == fake_answer(prompt, 4, suppressed=kept_away, min_tokens=4)
    assert kept.output[0] not in kept_away


@pytest.mark.parametrize("stage", [0, 1])
async def test_a_wrong_block_at_any_stage_shows_as_a_wrong_token(stage: int) -> None:
    async with fakes(2) as (pipeline, stages):
        job = pipeline.job(PROMPTS[-1], 2)
        await pipeline.step([job])
        stages[stage]._pool[job.table[1] * 16 + 3] ^= 1
        await pipeline.step([job])
    expected = fake_answer(PROMPTS[-1], 2)
    assert job.output[0] == expected[0]
    assert job.output[1] != expected[1]


async def test_logprobs_are_parallel_to_the_tokens_that_asked_for_them() -> None:
    async with fakes(2) as (pipeline, _):
        asked = pipeline.job(PROMPTS[0], 3, Sampling(top_p=1, logprobs=2))
        silent = pipeline.job(PROMPTS[1], 3)
        await pipeline.generate([silent, asked], 3)
    assert len(asked.logprobs) == len(silent.logprobs) == 3
    assert [entry.token_id for entry in asked.logprobs] == asked.output
    assert all(len(entry.top) == 2 for entry in asked.logprobs)
    assert all(entry == type(entry)() for entry in silent.logprobs)


@pytest.mark.parametrize("stage", [0, 1, 2])
async def test_a_plan_that_fails_is_a_fault_and_the_next_epoch_works(stage: int) -> None:
    async with fakes(3, FakeOptions(fault_on=frozenset({2})), faulty=stage) as (pipeline, _):
        job = pipeline.job(PROMPTS[2], 5)
        await pipeline.step([job])
        plan = pipeline.plan([job.item()])
        await pipeline.first.send_plan(plan)
        fault = await pipeline.clients[stage].fault()
        assert (fault.seq, fault.epoch) == (plan.seq, 1)
        assert "ordered to fail on plan number 2" in fault.message
        await pipeline.raise_epoch()
        again = pipeline.job(PROMPTS[2], 5)
        assert await pipeline.generate([again], 5) == [fake_answer(PROMPTS[2], 5)]


async def test_after_a_fault_every_plan_of_the_epoch_is_refused() -> None:
    async with fakes(1, FakeOptions(fault_on=frozenset({1}))) as (pipeline, _):
        job = pipeline.job(PROMPTS[2], 1)
        await pipeline.first.send_plan(pipeline.plan([job.item()]))
        await pipeline.first.fault()
        later = pipeline.plan([job.item()])
        await pipeline.first.send_plan(later)
        fault = await pipeline.first.fault()
        assert fault.seq == later.seq
        assert "ended with a fault" in fault.message


async def test_an_epoch_change_drops_what_is_in_flight() -> None:
    backend = FakeStage()
    async with FakeStageServer(backend) as server, Pipeline([server.address]) as pipeline:
        job = pipeline.job(PROMPTS[3], 4)
        backend.gate.clear()
        for _ in range(3):
            await pipeline.first.send_plan(pipeline.plan([job.item()]))
        await _until(lambda: backend.plans_seen == 1)
        readies = asyncio.create_task(pipeline.raise_epoch())
        await _until(lambda: server.stage is not None and server.stage.epoch == 2)
        assert not readies.done()  # ready means that nothing older computes any more
        backend.gate.set()
        assert [ready.epoch for ready in await readies] == [2]
        assert backend.plans_seen == 1  # the two behind it were never begun
        again = pipeline.job(PROMPTS[3], 4)
        assert await pipeline.generate([again], 4) == [fake_answer(PROMPTS[3], 4)]


async def test_health_answers_while_a_plan_computes() -> None:
    async with fakes(1) as (pipeline, stages):
        stages[0].gate.clear()
        await pipeline.first.send_plan(pipeline.plan([pipeline.job(PROMPTS[0], 1).item()]))
        await _until(lambda: stages[0].plans_seen == 1)
        assert await _health(pipeline.addresses[0], "")
        stages[0].gate.set()
        await pipeline.first.answer("iteration")


async def test_the_next_stage_dies_and_another_takes_its_place() -> None:
    first = FakeStage(stage=0, num_stages=2)
    async with FakeStageServer(first) as front, contextlib.AsyncExitStack() as stack:
        back = await stack.enter_async_context(FakeStageServer(FakeStage(stage=1, num_stages=2)))
        pipeline = await stack.enter_async_context(Pipeline([front.address, back.address]))
        job = pipeline.job(PROMPTS[1], 4)
        await pipeline.step([job])
        await back.__aexit__()
        fault = await pipeline.first.fault()
        assert fault.epoch == 1
        assert "link to the next stage" in fault.message
        async with FakeStageServer(FakeStage(stage=1, num_stages=2)) as spare:
            await pipeline.reconnect(1, spare.address)
            await pipeline.raise_epoch()
            again = pipeline.job(PROMPTS[1], 4)
            assert await pipeline.generate([again], 4) == [fake_answer(PROMPTS[1], 4)]


def _swap(plan: stage_pb2.IterationPlan) -> None:
    plan.swaps.add(swap_id=1)


def _no_tokens(plan: stage_pb2.IterationPlan) -> None:
    plan.items[0].num_tokens = 0


def _short_table(plan: stage_pb2.IterationPlan) -> None:
    plan.items[0].block_table = plan.items[0].block_table[:4]


def _missing_ids(plan: stage_pb2.IterationPlan) -> None:
    plan.items[0].token_ids = b""


def _too_long(plan: stage_pb2.IterationPlan) -> None:
    plan.items[0].start = 4096


def _foreign_block(plan: stage_pb2.IterationPlan) -> None:
    plan.items[0].block_table = pack_u32([300, 301])


def _old_seq(plan: stage_pb2.IterationPlan) -> None:
    plan.seq = 1


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_swap, "it says neither out nor in"),
        (_no_tokens, "at least one token"),
        (_short_table, "need 2 blocks"),
        (_missing_ids, "0 bytes of token ids"),
        (_too_long, "above the model length"),
        (_foreign_block, "outside the pool"),
        (_old_seq, "came after plan"),
    ],
)
async def test_a_malformed_plan_is_a_fault_that_says_why(
    spoil: Callable[[stage_pb2.IterationPlan], None], message: str
) -> None:
    async with fakes(1) as (pipeline, _):
        await pipeline.run([])
        plan = pipeline.plan([pipeline.job(PROMPTS[3], 1).item()])
        spoil(plan)
        await pipeline.first.send_plan(plan)
        fault = await pipeline.first.fault()
        assert fault.epoch == 1
        assert message in fault.message


async def test_a_plan_of_another_epoch_is_refused_and_harms_nothing() -> None:
    async with fakes(1) as (pipeline, _):
        plan = pipeline.plan([])
        plan.epoch = 9
        await pipeline.first.send_plan(plan)
        fault = await pipeline.first.fault()
        assert (fault.seq, fault.epoch) == (plan.seq, 9)
        await pipeline.run([])


async def test_plans_in_flight_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastserve_worker.epoch.MAX_PLANS_IN_FLIGHT", 3)
    async with fakes(1) as (pipeline, stages):
        stages[0].gate.clear()
        for _ in range(4):
            await pipeline.first.send_plan(pipeline.plan([]))
        fault = await pipeline.first.fault()
        assert fault.seq == 4
        assert "more than 3 plans in flight" in fault.message
        stages[0].gate.set()


async def test_queued_activations_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastserve_worker.epoch.MAX_QUEUED_ACTIVATION_BYTES", 8 * 100)
    async with fakes(2) as (pipeline, stages):
        stages[1].gate.clear()
        for _ in range(2):
            await pipeline.first.send_plan(pipeline.plan([pipeline.job(PROMPTS[-1], 1).item()]))
        assert "bytes of activations wait" in (await pipeline.last.fault()).message
        stages[1].gate.set()


async def test_a_higher_epoch_takes_the_stage_over_and_lower_ones_are_refused() -> None:
    async with FakeStageServer(FakeStage()) as server:
        old, new, late = (StageClient(server.address) for _ in range(3))
        await old.configure(3)
        await new.configure(5)
        with pytest.raises(grpc.aio.AioRpcError, match="another scheduler configured epoch 5"):
            await old.answer()
        with pytest.raises(grpc.aio.AioRpcError, match="epoch 5 is not above epoch 5") as refused:
            await late.configure(5)
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        await new.send_plan(stage_pb2.IterationPlan(seq=1, epoch=5))
        await new.answer("iteration")
        for client in (old, new, late):
            await client.aclose()


async def test_a_control_stream_begins_with_configure() -> None:
    async with FakeStageServer(FakeStage()) as server:
        client = StageClient(server.address)
        await client.send_plan(stage_pb2.IterationPlan(seq=1, epoch=1))
        with pytest.raises(grpc.aio.AioRpcError, match="must be a configure"):
            await client.answer()
        await client.aclose()


async def test_plans_reach_later_stages_from_the_stage_before_only() -> None:
    async with fakes(2) as (pipeline, _):
        plan = pipeline.plan([])
        await pipeline.last.send_plan(plan)
        assert "from the one before it" in (await pipeline.last.fault()).message


async def test_profile_orders_are_answered_point_by_point() -> None:
    async with fakes(2, FakeOptions(iteration_ns=1_000, token_ns=10)) as (pipeline, _):
        points = [stage_pb2.ProfilePoint(num_sequences=n, new_tokens=2, context_tokens=5) for n in (1, 4)]
        order = stage_pb2.ProfileOrder(profile_id=8, epoch=1, points=points)
        for stage, client in enumerate(pipeline.clients):
            await client.call.write(stage_pb2.ControlMessage(profile=order))
            report = (await client.answer("profile")).profile
            assert (report.profile_id, report.stage, list(report.compute_ns)) == (8, stage, [1_020, 1_080])


async def test_a_profile_order_blocks_neither_plans_nor_epochs_and_there_is_one_at_a_time() -> None:
    async with fakes(1) as (pipeline, stages):
        stages[0].gate.clear()
        await pipeline.first.send_plan(pipeline.plan([]))
        points = [stage_pb2.ProfilePoint(num_sequences=1, new_tokens=1)]
        for profile_id, epoch in ((1, 1), (2, 1), (3, 9)):
            order = stage_pb2.ProfileOrder(profile_id=profile_id, epoch=epoch, points=points)
            await pipeline.first.call.write(stage_pb2.ControlMessage(profile=order))
        assert "order 2: another one is in progress" in (await pipeline.first.fault()).message
        assert "order 3: it is of epoch 9" in (await pipeline.first.fault()).message
        stages[0].gate.set()
        await pipeline.first.answer("iteration")
        assert (await pipeline.first.answer("profile")).profile.profile_id == 1


async def test_a_stage_that_is_stuck_is_not_healthy_until_it_moves_again() -> None:
    backend = FakeStage()
    async with serve_in_process(backend, stall_timeout_s=0.05) as (_, address), Pipeline([address]) as pipeline:
        assert await _health(address, LIVENESS)
        backend.gate.clear()
        await pipeline.first.send_plan(pipeline.plan([]))
        await _until_health(address, False)
        backend.gate.set()
        await pipeline.first.answer("iteration")
        await _until_health(address, True)


async def _health(address: str, service: str) -> bool:
    async with open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=service)
        answer = await stub.Check(request, timeout=5)  # type: ignore[attr-defined]  # stubs miss it
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def _until_health(address: str, healthy: bool) -> None:
    async with asyncio.timeout(20):
        for service in (LIVENESS, ""):
            while await _health(address, service) is not healthy:
                pass


async def test_forward_streams_of_other_epochs_and_stages_are_refused() -> None:
    async with fakes(2) as (pipeline, _):
        await pipeline.run([])
        async with open_channel(pipeline.addresses[1]) as channel:
            stub = stage_pb2_grpc.StageStub(channel)
            for hello, code in (
                (stage_pb2.ForwardHello(epoch=0, from_stage=0), grpc.StatusCode.FAILED_PRECONDITION),
                (stage_pb2.ForwardHello(epoch=1, from_stage=0), grpc.StatusCode.ALREADY_EXISTS),
                (stage_pb2.ForwardHello(epoch=1, from_stage=1), grpc.StatusCode.INVALID_ARGUMENT),
            ):
                call = stub.Forward()
                await call.write(stage_pb2.ForwardMessage(hello=hello))
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call.read()
                assert refused.value.code() is code


async def test_a_forward_stream_waits_until_its_epoch_has_come() -> None:
    async with (
        FakeStageServer(FakeStage(stage=0, num_stages=2)) as front,
        FakeStageServer(FakeStage(stage=1, num_stages=2)) as back,
    ):
        first, last = StageClient(front.address), StageClient(back.address)
        await first.configure(1, back.address)
        await first.send_plan(stage_pb2.IterationPlan(seq=1, epoch=1))
        await first.answer("iteration")
        await last.configure(1)
        assert (await last.answer("iteration")).iteration.seq == 1
        await first.aclose()
        await last.aclose()


async def test_cancelled_streams_leave_no_task_behind() -> None:
    async with (
        FakeStageServer(FakeStage(stage=1, num_stages=2)) as server,
        open_channel(server.address) as channel,
    ):
        stub = stage_pb2_grpc.StageStub(channel)
        before = len(asyncio.all_tasks())
        for epoch in range(1, 251):
            control, forward = stub.Control(), stub.Forward()
            await control.write(stage_pb2.ControlMessage(configure=stage_pb2.Configure(epoch=epoch)))
            hello = stage_pb2.ForwardHello(epoch=epoch + epoch % 2, from_stage=0)  # every other one has to wait
            await forward.write(stage_pb2.ForwardMessage(hello=hello))
            if epoch % 3:
                plan = stage_pb2.IterationPlan(seq=1, epoch=epoch)
                await forward.write(stage_pb2.ForwardMessage(plan=plan))
            if epoch % 5 == 0:
                await control.read()
            forward.cancel()
            control.cancel()
        await _until(lambda: len(asyncio.all_tasks()) <= before + 2)
        async with contextlib.aclosing(StageClient(server.address)) as client:
            assert (await client.configure(1000)).epoch == 1000


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - the other thread and the library announce nothing
            await asyncio.sleep(0.005)
