"""Greedy answers equal plain transformers' token for token, whatever the cut, the batch mates and the interruptions."""

from collections.abc import Callable

import pytest

from fastserve_worker.engine.offline import OfflinePipeline, OfflineSequence

from .models import MODEL_CONFIGS, TinyModel

MODELS = list(MODEL_CONFIGS)


def _load(model: TinyModel, num_stages: int, chunk_tokens: int | None = None) -> OfflinePipeline:
    return OfflinePipeline.load(model.folder, num_blocks=40, num_stages=num_stages, chunk_tokens=chunk_tokens)


def _run_with_late_arrivals(
    pipeline: OfflinePipeline, model: TinyModel, interrupt: Callable[[OfflineSequence], None] | None = None
) -> list[list[int]]:
    """Sequences join one by one while others run, so batches mix prefill chunks and decode tokens."""
    count = len(model.expected[0])
    waiting = [pipeline.add(prompt, count) for prompt in model.prompts]
    everyone, running, step = list(waiting), [waiting.pop(0)], 0
    while running:
        pipeline.step(running)
        step += 1
        if interrupt is not None and step % 2 == 0 and not running[0].done:
            interrupt(running[0])
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
