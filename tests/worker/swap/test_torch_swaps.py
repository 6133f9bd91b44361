"""Real KV in real shared memory: tokens are plain transformers', wherever the blocks have been meanwhile."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import torch

from fastserve_common.state import SqliteState
from fastserve_worker.engine import StageModel
from fastserve_worker.service import StageServer
from fastserve_worker.swap.arena_map import HostLink
from fastserve_worker.torch_stage import TorchStage

from .conftest import MAX_MODEL_LEN, NUM_OUTPUT, TinyLlama
from .rig import IN, NODE, OUT, Job, Pipeline, Swapper, kvstore

NUM_BLOCKS = 64
ARENA_BYTES = 2 * 1024 * 1024


def stage_of(folder: Path, stage: int, num_stages: int) -> TorchStage:
    device = torch.device("cpu")
    model = StageModel.load(folder, stage=stage, num_stages=num_stages, dtype=torch.float32, device=device)
    return TorchStage.of_model(
        model,
        stage=stage,
        num_stages=num_stages,
        num_blocks=NUM_BLOCKS,
        block_size=16,
        max_model_len=MAX_MODEL_LEN,
        device=device,
    )


@contextlib.asynccontextmanager
async def stages_on_arena(
    model: TinyLlama, tmp_path: Path, num_stages: int
) -> AsyncIterator[tuple[Swapper, list[TorchStage]]]:
    async with contextlib.AsyncExitStack() as stack:
        state = SqliteState(tmp_path / "state.db")
        stack.push_async_callback(state.close)
        store = await stack.enter_async_context(kvstore(state, ARENA_BYTES))
        stages, addresses = [stage_of(model.folder, stage, num_stages) for stage in range(num_stages)], []
        for stage in stages:
            server = StageServer()
            addresses.append(f"127.0.0.1:{await server.start('127.0.0.1:0')}")
            stack.push_async_callback(server.stop, 0.2)
            await server.load(lambda stage=stage: stage)  # type: ignore[misc]  # mypy sees no default argument
            shape = stage.memory.shape
            await HostLink(state, NODE, stage.info, shape, checksums=True, use=server.attach_host).refresh()
        pipeline = await stack.enter_async_context(Pipeline(addresses))
        yield Swapper(pipeline, store.generation), stages


def poison(stages: Sequence[TorchStage], blocks: Sequence[int]) -> None:
    """Nothing computes meanwhile."""
    for stage in stages:
        for block in blocks:
            stage._pool.block_view(block).view(torch.float32).fill_(1e9)


@pytest.mark.parametrize("num_stages", [pytest.param(1, marks=pytest.mark.full), 2])
async def test_a_job_moves_between_any_two_tokens(tiny_llama: TinyLlama, tmp_path: Path, num_stages: int) -> None:
    """Two jobs pass each other, one on its way out while the other comes in and a third one computes."""
    async with stages_on_arena(tiny_llama, tmp_path, num_stages) as (swapper, stages):
        first, second, mate = (swapper.pipeline.job(prompt, NUM_OUTPUT) for prompt in tiny_llama.prompts[:3])
        await swapper.run([first, second, mate])
        spare = list(range(40, 40 + len(first.table) + len(second.table)))
        out = await _leave(swapper, stages, second, [0, 1])
        for position in range(1, NUM_OUTPUT):
            slots = [10 * position + i for i in range(len(first.table))]
            coming, going = (second, first) if position % 2 else (first, second)
            out = await _pass_by(swapper, stages, going, coming, mate, out, slots, spare)
            await swapper.run([coming])
        await _come_back(swapper, going, out, spare)
        for job in (first, second, mate):
            await swapper.pipeline.generate([job], NUM_OUTPUT)
    assert [job.output for job in (first, second, mate)] == tiny_llama.answers[:3]


async def _leave(swapper: Swapper, stages: Sequence[TorchStage], job: Job, slots: list[int]) -> list[int]:
    reports = await swapper.run([], swapper.op(OUT, job.job_id, job.table, slots))
    assert [report.error for report in reports] == [""] * len(stages)
    poison(stages, job.table)
    return slots


async def _come_back(swapper: Swapper, job: Job, slots: list[int], spare: list[int]) -> None:
    """To other blocks than it left."""
    old, job.table = job.table, [spare.pop(0) for _ in job.table]
    await swapper.run([], swapper.op(IN, job.job_id, job.table, slots))
    spare.extend(old)


async def _pass_by(
    swapper: Swapper,
    stages: Sequence[TorchStage],
    going: Job,
    coming: Job,
    mate: Job,
    slots_in: list[int],
    slots_out: list[int],
    spare: list[int],
) -> list[int]:
    old, coming.table = coming.table, [spare.pop(0) for _ in coming.table]
    items = [mate] if len(mate.output) < NUM_OUTPUT else []
    reports = await swapper.run(
        items,
        swapper.op(OUT, going.job_id, going.table, slots_out[: len(going.table)]),
        swapper.op(IN, coming.job_id, coming.table, slots_in),
    )
    assert [report.error for report in reports] == [""] * 2 * len(stages)
    spare.extend(old)
    poison(stages, going.table)
    return slots_out[: len(going.table)]


async def test_a_job_is_computed_in_the_plan_that_brings_it_back(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    """Out right behind the plan that computes it, in with the plan that goes on: nothing waits in between."""
    async with stages_on_arena(tiny_llama, tmp_path, 2) as (swapper, stages):
        job = swapper.pipeline.job(tiny_llama.prompts[2], NUM_OUTPUT)
        homes = (job.table, list(range(50, 50 + len(job.table))))
        await swapper.run([job])
        for position in range(1, NUM_OUTPUT):
            await _leave(swapper, stages, job, list(range(len(job.table))))
            job.table = homes[position % 2]
            await swapper.run([job], swapper.op(IN, job.job_id, job.table, list(range(len(job.table)))))
    assert job.output == tiny_llama.answers[2]


async def test_kv_on_the_host_outlives_the_epoch(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    async with stages_on_arena(tiny_llama, tmp_path, 2) as (swapper, stages):
        job = swapper.pipeline.job(tiny_llama.prompts[2], NUM_OUTPUT)
        await swapper.run([job])
        await _leave(swapper, stages, job, [0, 1, 2])
        readies = await swapper.pipeline.raise_epoch()
        assert len({ready.num_host_slots for ready in readies}) == 1
        job.table = [30, 31, 32]
        await swapper.run([], swapper.op(IN, job.job_id, job.table, [0, 1, 2]))
        assert await swapper.pipeline.generate([job], NUM_OUTPUT) == [tiny_llama.answers[2]]
