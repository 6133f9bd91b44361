"""Two ranks of one stage over real gRPC: epochs that end while they compute, and what a whole swap is."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from fastserve.v1 import stage_pb2
from fastserve_worker.backend import Turn
from fastserve_worker.engine import StageModel
from fastserve_worker.errors import PlanError
from fastserve_worker.messages import Activations, Plan, StageOutput
from fastserve_worker.ranks.errors import RankLostError
from fastserve_worker.ranks.followers import Followers
from fastserve_worker.ranks.group import RankGroup
from fastserve_worker.ranks.swap_reports import SwapReports
from fastserve_worker.service import serve_in_process
from fastserve_worker.torch_stage import TorchStage

from .conftest import MAX_MODEL_LEN, NUM_OUTPUT, TinyLlama
from .rig import Pipeline

CPU = torch.device("cpu")


def stages_of(model: TinyLlama, timeout_s: float) -> list[TorchStage]:
    """One per rank."""
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(lambda rank: RankGroup(store, rank, 2, device=CPU, timeout_s=timeout_s), range(2)))
    return [
        TorchStage.of_model(
            StageModel.load(model.folder, stage=0, num_stages=1, dtype=torch.float32, device=CPU, ranks=group),
            stage=0,
            num_stages=1,
            num_blocks=64,
            block_size=16,
            max_model_len=MAX_MODEL_LEN,
            device=CPU,
            group=group,
        )
        for group in groups
    ]


@contextlib.asynccontextmanager
async def two_ranks(model: TinyLlama, timeout_s: float = 60.0) -> AsyncIterator[tuple[Pipeline, "asyncio.Task[None]"]]:
    """And what rank 0 hears of the other."""
    first, second = stages_of(model, timeout_s)
    async with serve_in_process(second) as (_, there), serve_in_process(first) as (stage, address):
        followers = Followers([there])
        stage.lead(followers)
        task = asyncio.create_task(followers.run())
        async with Pipeline([address]) as pipeline:
            yield pipeline, task
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_epochs_may_end_at_any_time(tiny_llama: TinyLlama) -> None:
    """What rank 0 has taken and not begun is dropped there, and the other has begun it already."""
    async with two_ranks(tiny_llama) as (pipeline, followers):
        for num_sent in (0, 1, 2, 3, 5, 8, 1, 4) * 3:
            jobs = [pipeline.job(prompt, NUM_OUTPUT) for prompt in tiny_llama.prompts]
            for _ in range(num_sent):
                await pipeline.first.send_plan(pipeline.plan([job.item() for job in jobs]))
            await pipeline.raise_epoch()
        jobs = [pipeline.job(prompt, NUM_OUTPUT) for prompt in tiny_llama.prompts]
        assert await pipeline.generate(jobs, NUM_OUTPUT) == tiny_llama.answers
        assert not followers.done()


async def test_what_rank_0_could_not_begin_is_left_out(tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    """A swap failed there, say. It goes on to the plan behind it, which was queued already."""
    async with two_ranks(tiny_llama) as (pipeline, followers):
        run, both_taken, num_sent = TorchStage.run, threading.Event(), 0
        send_plan = Followers.send_plan

        def count(self: Followers, plan: stage_pb2.IterationPlan) -> None:
            nonlocal num_sent
            send_plan(self, plan)
            num_sent += 1
            if num_sent == 2:
                both_taken.set()

        def refuse_the_first(self: TorchStage, plan: Plan, activations: Activations | None) -> StageOutput:
            if self.info.rank == 0 and plan.seq == first.seq:
                both_taken.wait()
                raise PlanError("it computes with blocks of a swap that failed")
            return run(self, plan, activations)

        monkeypatch.setattr(Followers, "send_plan", count)
        monkeypatch.setattr(TorchStage, "run", refuse_the_first)
        items = [pipeline.job(tiny_llama.prompts[0], NUM_OUTPUT).item()]
        first = pipeline.plan(items)
        await pipeline.first.send_plan(first)
        await pipeline.first.send_plan(pipeline.plan(items))
        assert "a swap that failed" in (await pipeline.first.fault()).message
        await pipeline.raise_epoch()
        jobs = [pipeline.job(prompt, NUM_OUTPUT) for prompt in tiny_llama.prompts]
        assert await pipeline.generate(jobs, NUM_OUTPUT) == tiny_llama.answers
        assert not followers.done()


async def test_a_profile_is_measured_by_all_ranks(tiny_llama: TinyLlama) -> None:
    async with two_ranks(tiny_llama) as (pipeline, followers):
        points = [stage_pb2.ProfilePoint(num_sequences=2, new_tokens=1, context_tokens=count) for count in (0, 9, 17)]
        order = stage_pb2.ProfileOrder(profile_id=3, epoch=pipeline.epoch, points=points)
        await pipeline.first.call.write(stage_pb2.ControlMessage(profile=order))
        report = (await pipeline.first.answer("profile")).profile
        assert (report.profile_id, len(report.compute_ns)) == (3, 3)
        assert (await pipeline.raise_epoch())[0].device == "cpux2", "what one rank alone measured does not fit"
        jobs = [pipeline.job(prompt, NUM_OUTPUT) for prompt in tiny_llama.prompts]
        assert await pipeline.generate(jobs, NUM_OUTPUT) == tiny_llama.answers
        assert not followers.done()


async def test_a_rank_that_fails_ends_the_stage(tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    async with two_ranks(tiny_llama, timeout_s=10.0) as (pipeline, followers):
        run = TorchStage.run

        def fail(self: TorchStage, *args: object) -> object:
            if self.info.rank == 1:
                raise MemoryError("no memory left")
            return run(self, *args)  # type: ignore[arg-type]  # as run() has them

        monkeypatch.setattr(TorchStage, "run", fail)
        job = pipeline.job(tiny_llama.prompts[0], NUM_OUTPUT)
        await pipeline.first.send_plan(pipeline.plan([job.item()]))
        with pytest.raises(RankLostError, match=r"rank 1 failed: .*no memory left"):
            await followers


@pytest.mark.parametrize(
    ("point", "broken"),
    [
        (stage_pb2.ProfilePoint(num_sequences=1, new_tokens=MAX_MODEL_LEN + 1), False),
        (stage_pb2.ProfilePoint(num_sequences=1, new_tokens=1), True),
    ],
    ids=["refused by all", "failed by one"],
)
async def test_a_profile_that_one_rank_fails_ends_the_stage(
    point: stage_pb2.ProfilePoint, broken: bool, tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = stages_of(tiny_llama, timeout_s=10.0)
    begin = RankGroup.begin

    def fail(self: RankGroup, turn: Turn) -> None:
        if broken and turn[2] and self.rank == 1:
            raise MemoryError("no memory left")
        begin(self, turn)

    monkeypatch.setattr(RankGroup, "begin", fail)
    async with serve_in_process(second) as (follower, there), serve_in_process(first) as (stage, address):
        followers = Followers([there])
        stage.lead(followers)
        task = asyncio.create_task(followers.run())
        async with Pipeline([address]) as pipeline:
            order = stage_pb2.ProfileOrder(profile_id=1, epoch=pipeline.epoch, points=[point])
            await pipeline.first.call.write(stage_pb2.ControlMessage(profile=order))
            assert "profile order 1" in (await pipeline.first.fault()).message
        assert (follower.broken.done(), stage.broken.done()) == (broken, broken)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_a_swap_is_whole_when_every_rank_has_made_its_part() -> None:
    reports = SwapReports(3)

    def part(swap_id: int, num_bytes: int, begin_ns: int, copy_ns: int, error: str = "") -> stage_pb2.SwapReport:
        return stage_pb2.SwapReport(
            swap_id=swap_id, epoch=4, stage=1, bytes=num_bytes, begin_ns=begin_ns, copy_ns=copy_ns, error=error
        )

    assert reports.add(part(1, 10, 100, 5)) is None
    assert reports.add(part(2, 1, 1, 1)) is None
    assert reports.add(part(1, 10, 90, 7, "a checksum does not match")) is None
    whole = reports.add(part(1, 10, 95, 6))
    assert whole == part(1, 30, 90, 7, "a checksum does not match")
    assert reports.add(part(2, 1, 1, 1)) is None
    assert reports.add(part(2, 1, 1, 1)) == part(2, 3, 1, 1)
