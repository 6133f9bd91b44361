"""Real stages over real gRPC: the tokens are plain transformers', whatever the cut, the batch and the interruptions."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import torch

from fastserve.v1 import stage_pb2
from fastserve_worker import codec
from fastserve_worker.engine import StageModel
from fastserve_worker.engine.native.kernels import BLOCK_SIZE
from fastserve_worker.settings import NATIVE_BLOCK_SIZE
from fastserve_worker.torch_stage import TorchStage, whole_block_bytes
from fastserve_worker.worker import backend_maker

from .conftest import MAX_MODEL_LEN, NUM_OUTPUT, VOCAB_SIZE, TinyLlama
from .rig import Pipeline, Sampling, pipeline_of
from .test_worker import fake_settings

NUM_BLOCKS = 64


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
async def stages_of(model: TinyLlama, num_stages: int) -> AsyncIterator[Pipeline]:
    async with pipeline_of(lambda stage, of: stage_of(model.folder, stage, of), num_stages) as pipeline:
        yield pipeline


def test_the_answers_are_varied(tiny_llama: TinyLlama) -> None:
    assert len({token for answer in tiny_llama.answers for token in answer}) > 20


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("max_tokens", [None, 7])
async def test_tokens_equal_transformers(tiny_llama: TinyLlama, num_stages: int, max_tokens: int | None) -> None:
    async with stages_of(tiny_llama, num_stages) as pipeline:
        readies = await pipeline.raise_epoch()
        jobs = [pipeline.job(prompt, NUM_OUTPUT) for prompt in tiny_llama.prompts]
        answers = await pipeline.generate(jobs, NUM_OUTPUT, max_tokens)
    assert answers == tiny_llama.answers
    assert len({ready.model_fingerprint for ready in readies}) == 1
    assert {ready.num_blocks for ready in readies} == {NUM_BLOCKS}
    assert sum(ready.kv_block_bytes for ready in readies) == 4 * 2 * 2 * 16 * 16 * 4  # layers, K and V, heads, ...


@pytest.mark.parametrize("num_stages", [1, 2])
async def test_chunks_without_a_draw_and_empty_batches(tiny_llama: TinyLlama, num_stages: int) -> None:
    prompt = tiny_llama.prompts[2]
    async with stages_of(tiny_llama, num_stages) as pipeline:
        job = pipeline.job(prompt, NUM_OUTPUT)
        assert (await pipeline.run([job.item(20)])).token_ids == b""
        job.computed = 20
        assert (await pipeline.run([])).token_ids == b""
        assert await pipeline.generate([job], NUM_OUTPUT) == [tiny_llama.answers[2]]


async def test_logprobs_equal_transformers_and_are_as_many_as_the_tokens(tiny_llama: TinyLlama) -> None:
    async with stages_of(tiny_llama, 2) as pipeline:
        jobs = [pipeline.job(prompt, NUM_OUTPUT, Sampling(logprobs=3)) for prompt in tiny_llama.prompts]
        await pipeline.generate(jobs, NUM_OUTPUT)
    for job, expected in zip(jobs, tiny_llama.logprobs, strict=True):
        assert [entry.token_id for entry in job.logprobs] == job.output
        assert [entry.logprob for entry in job.logprobs] == pytest.approx(expected, abs=1e-4)
        assert all(entry.top[0].token_id == entry.token_id for entry in job.logprobs)
        assert all(len(entry.top) == 3 for entry in job.logprobs)


SEEDED = Sampling(temperature=0.9, top_p=0.95, seed=7)
PENALISED = Sampling(temperature=0.9, top_p=1, seed=7, repetition_penalty=1.3, presence_penalty=0.4)


async def _alone(model: TinyLlama, sampling: Sampling, num_stages: int) -> list[int]:
    async with stages_of(model, num_stages) as pipeline:
        return (await pipeline.generate([pipeline.job(model.prompts[0], 20, sampling)], 20))[0]


@pytest.mark.parametrize("sampling", [SEEDED, PENALISED])
async def test_a_seeded_answer_depends_on_its_seed_only(tiny_llama: TinyLlama, sampling: Sampling) -> None:
    expected = await _alone(tiny_llama, sampling, 1)
    assert expected[:NUM_OUTPUT] != tiny_llama.answers[0]
    assert await _alone(tiny_llama, sampling, 2) == expected
    async with stages_of(tiny_llama, 2) as pipeline:
        neighbours = [
            pipeline.job(tiny_llama.prompts[i % 4], 20, Sampling(temperature=1.0, top_p=1, seed=i) if i % 2 else None)
            for i in range(7)
        ]
        job = pipeline.job(tiny_llama.prompts[0], 20, sampling)
        await pipeline.generate([*neighbours[:3], job, *neighbours[3:]], 20, max_tokens=9)
    assert job.output == expected


@pytest.mark.parametrize("preempt_at", [1, 8, 9])
@pytest.mark.parametrize("sampling", [None, SEEDED, PENALISED])
async def test_recompute_continues_the_same_answer(
    tiny_llama: TinyLlama, preempt_at: int, sampling: Sampling | None
) -> None:
    """The KV is lost with the epoch; prompt and generated ids are prefilled again, into other blocks."""
    expected = await _alone(tiny_llama, sampling or Sampling(), 1)
    async with stages_of(tiny_llama, 2) as pipeline:
        job = pipeline.job(tiny_llama.prompts[0], 20, sampling)
        await pipeline.generate([job], preempt_at)
        await pipeline.raise_epoch()
        pipeline.job(tiny_llama.prompts[1], 30)
        job.computed, job.table = 0, pipeline.job(tiny_llama.prompts[0], 20).table
        assert await pipeline.generate([job], 20, max_tokens=6) == [expected]


async def test_an_epoch_change_in_mid_flight(tiny_llama: TinyLlama) -> None:
    async with stages_of(tiny_llama, 3) as pipeline:
        for _ in range(4):
            jobs = [pipeline.job(prompt, 1) for prompt in tiny_llama.prompts]
            for job in jobs:
                await pipeline.first.send_plan(pipeline.plan([job.item()]))
            await pipeline.raise_epoch()
        jobs = [pipeline.job(prompt, NUM_OUTPUT) for prompt in tiny_llama.prompts]
        assert await pipeline.generate(jobs, NUM_OUTPUT) == tiny_llama.answers


async def test_activations_larger_than_a_chunk(tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "ACTIVATION_CHUNK_BYTES", 1_001)  # not even a whole row
    async with stages_of(tiny_llama, 3) as pipeline:
        jobs = [pipeline.job(prompt, NUM_OUTPUT) for prompt in tiny_llama.prompts]
        assert await pipeline.generate(jobs, NUM_OUTPUT) == tiny_llama.answers


async def test_a_token_outside_the_vocabulary_is_a_fault(tiny_llama: TinyLlama) -> None:
    async with stages_of(tiny_llama, 1) as pipeline:
        item = pipeline.job([VOCAB_SIZE], 1).item()
        await pipeline.first.send_plan(pipeline.plan([item]))
        assert "outside the vocabulary of 307" in (await pipeline.first.fault()).message
        await pipeline.raise_epoch()
        job = pipeline.job(tiny_llama.prompts[0], NUM_OUTPUT)
        assert await pipeline.generate([job], NUM_OUTPUT) == [tiny_llama.answers[0]]


async def _profile(pipeline: Pipeline, stage: int, points: Sequence[stage_pb2.ProfilePoint]) -> stage_pb2.StageMessage:
    order = stage_pb2.ProfileOrder(profile_id=1, epoch=pipeline.epoch, points=points)
    await pipeline.clients[stage].call.write(stage_pb2.ControlMessage(profile=order))
    return await pipeline.clients[stage].answer()


async def test_profiling_between_iterations_harms_no_job(tiny_llama: TinyLlama) -> None:
    points = [
        stage_pb2.ProfilePoint(num_sequences=1, new_tokens=100, context_tokens=0),
        stage_pb2.ProfilePoint(num_sequences=3, new_tokens=1, context_tokens=90),
    ]
    async with stages_of(tiny_llama, 2) as pipeline:
        jobs = [pipeline.job(prompt, NUM_OUTPUT) for prompt in tiny_llama.prompts]
        await pipeline.generate(jobs, 4)
        for stage in (0, 1):
            report = (await _profile(pipeline, stage, points)).profile
            assert len(report.compute_ns) == 2
            assert min(report.compute_ns) > 0
        assert await pipeline.generate(jobs, NUM_OUTPUT) == tiny_llama.answers


@pytest.mark.parametrize(
    ("shape", "message"),
    [((1, 0, 5), "is not a batch"), ((1, 1, MAX_MODEL_LEN), "is not a batch"), ((65, 1, 0), "the pool has 64")],
)
async def test_a_profile_point_that_can_never_run(
    tiny_llama: TinyLlama, shape: tuple[int, int, int], message: str
) -> None:
    point = stage_pb2.ProfilePoint(num_sequences=shape[0], new_tokens=shape[1], context_tokens=shape[2])
    async with stages_of(tiny_llama, 1) as pipeline:
        answer = await _profile(pipeline, 0, [point])
        assert message in answer.fault.message
        await pipeline.run([])  # the epoch goes on


def test_a_stage_is_loaded_as_the_settings_say(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    block_bytes = 4 * 2 * 2 * 16 * 16 * 4
    settings = fake_settings(
        tmp_path,
        fake=False,
        model_dir=tiny_llama.folder,
        stage=1,
        num_stages=2,
        kv_memory=100 * block_bytes + 1,
        threads=1,
    )
    stage = backend_maker(settings)()
    assert isinstance(stage, TorchStage)
    assert stage.info.num_blocks == 100
    assert stage.info.max_model_len == MAX_MODEL_LEN
    assert (stage.info.stage, stage.info.num_stages, stage.info.dtype) == (1, 2, "float32")
    assert whole_block_bytes(stage._model.config, 16) == block_bytes


async def test_other_block_sizes_work_without_the_native_layers(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    settings = fake_settings(
        tmp_path, fake=False, model_dir=tiny_llama.folder, threads=1, kv_memory="1MiB", linear="torch", block_size=8
    )
    async with pipeline_of(lambda stage, of: backend_maker(settings)(), 1) as pipeline:
        jobs = [pipeline.job(prompt, 2 * NUM_OUTPUT + len(prompt)) for prompt in tiny_llama.prompts]  # blocks enough
        assert await pipeline.generate(jobs, NUM_OUTPUT) == tiny_llama.answers


def test_the_settings_know_the_kernels_block_size() -> None:
    assert NATIVE_BLOCK_SIZE == BLOCK_SIZE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_model_len": 1000}, "--max-model-len: the model has positions for 256"),
        ({"kv_memory": 1000}, "--kv-memory: 1000 bytes holds 0 tokens"),
        ({"model_dir": "/nowhere"}, "--model-dir: /nowhere is not a folder"),
        ({"device": "cuda"}, "--device: cuda is not available"),
        ({"num_stages": 9}, "cannot cut 4 layers into 9 stages"),
    ],
)
def test_what_cannot_be_loaded_is_a_sentence(
    tiny_llama: TinyLlama, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    if changes.get("device") == "cuda" and torch.cuda.is_available():
        changes = {**changes, "kv_memory": 1}
        message = "--kv-memory"
    settings = fake_settings(tmp_path, **{"fake": False, "model_dir": tiny_llama.folder, "threads": 1, **changes})
    with pytest.raises(ValueError, match=message):
        backend_maker(settings)()
