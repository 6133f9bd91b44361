"""Greedy answers equal plain transformers' token for token, whatever the cut, the batch mates and the interruptions."""

from collections.abc import Callable

import pytest

from fastserve_worker.engine.native import load_kernels
from fastserve_worker.engine.native.kernels import MODE_VARIABLE
from fastserve_worker.engine.offline import OfflinePipeline

from .models import MODEL_CONFIGS, TinyModel

MODELS = list(MODEL_CONFIGS)


def _load(model: TinyModel, num_stages: int, chunk_tokens: int | None = None) -> OfflinePipeline:
    return OfflinePipeline.load(model.folder, num_blocks=40, num_stages=num_stages, chunk_tokens=chunk_tokens)


def _run_with_late_arrivals(pipeline: OfflinePipeline, model: TinyModel) -> list[list[int]]:
    """Sequences join one by one while others run, so batches mix prefill chunks and decode tokens."""
    count = len(model.expected[0])
    waiting = [pipeline.add(prompt, count) for prompt in model.prompts]
    everyone, running, step = list(waiting), [waiting.pop(0)], 0
    while running:
        pipeline.step(running)
        step += 1
        running = [sequence for sequence in running if not sequence.done][::-1]
        if waiting and (step % 3 == 0 or not running):
            running.append(waiting.pop(0))
    return [sequence.output for sequence in everyone]


@pytest.mark.parametrize("name", MODELS)
def test_random_weights_give_varied_answers(name: str, tiny_model: Callable[[str], TinyModel]) -> None:
    tokens = {token for output in tiny_model(name).expected for token in output}
    assert len(tokens) >= 8


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_mixed_batches_with_chunked_prefill(name: str, num_stages: int, tiny_model: Callable[[str], TinyModel]) -> None:
    model = tiny_model(name)
    pipeline = _load(model, num_stages=num_stages, chunk_tokens=7)
    assert _run_with_late_arrivals(pipeline, model) == model.expected
    assert pipeline.num_free_blocks == 40


@pytest.mark.parametrize("name", ["opt", "llama-gqa", "mistral-window", "gemma2-softcap", "gpt-bigcode-mqa"])
def test_mixed_batches_in_plain_torch(
    name: str, tiny_model: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MODE_VARIABLE, "off")
    model = tiny_model(name)
    assert _run_with_late_arrivals(_load(model, num_stages=2, chunk_tokens=7), model) == model.expected


def test_blocks_of_another_size_in_plain_torch(
    tiny_model: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MODE_VARIABLE, "off")
    model = tiny_model("llama-gqa")
    pipeline = OfflinePipeline.load(model.folder, num_blocks=200, block_size=5)
    assert pipeline.generate(model.prompts, [14] * len(model.prompts)) == model.expected


@pytest.mark.skipif(load_kernels() is None, reason="needs the native kernels")
def test_fused_layers_refuse_a_pool_they_cannot_read(tiny_model: Callable[[str], TinyModel]) -> None:
    pipeline = OfflinePipeline.load(tiny_model("llama-gqa").folder, num_blocks=9, block_size=8)
    with pytest.raises(ValueError, match="blocks of 16 tokens"):
        pipeline.generate([[5, 6]], [1])
