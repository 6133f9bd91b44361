"""What is promised about batch mates: the same tokens for every model, the same bits where layers are fused."""

from collections.abc import Callable

import pytest
import torch

from fastserve_worker.engine.native import load_kernels
from fastserve_worker.engine.offline import OfflinePipeline

from .models import TinyModel


def _logits_of_first(pipeline: OfflinePipeline, prompts: list[list[int]], steps: int) -> tuple[torch.Tensor, list[int]]:
    sequences = [pipeline.add(prompt, steps) for prompt in prompts]
    logits = [pipeline.step(sequences)[0] for _ in range(steps)]
    return torch.stack(logits), sequences[0].output


@pytest.mark.parametrize("name", ["opt", "llama-gqa", "qwen3", "gemma3"])
def test_same_answer_alone_and_in_batches(name: str, tiny_model: Callable[[str], TinyModel]) -> None:
    model = tiny_model(name)
    pipeline = OfflinePipeline.load(model.folder, num_blocks=64)
    steps = len(model.expected[0])
    alone, answer = _logits_of_first(pipeline, model.prompts[:1], steps)
    assert answer == model.expected[0]
    for batch in (2, 4, 8):
        prompts = (model.prompts * 2)[:batch]
        logits, in_batch = _logits_of_first(pipeline, prompts, steps)
        assert in_batch == answer
        torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(load_kernels() is None, reason="needs the native kernels")
@pytest.mark.parametrize("name", ["llama-gqa", "llama-mqa-tied", "qwen2", "qwen3", "mistral-window"])
def test_same_bits_alone_in_batches_and_in_chunks(name: str, tiny_model: Callable[[str], TinyModel]) -> None:
    model = tiny_model(name)
    whole = OfflinePipeline.load(model.folder, num_blocks=64)
    alone, _ = _logits_of_first(whole, model.prompts[:1], 4)
    for batch in (2, 4, 8):
        logits, _ = _logits_of_first(whole, (model.prompts * 2)[:batch], 4)
        assert torch.equal(logits, alone)
    chunked = OfflinePipeline(whole.stages, num_blocks=64, device=torch.device("cpu"), chunk_tokens=2)
    sequence = chunked.add(model.prompts[0], 4)
    in_chunks = [step[0] for step in (chunked.step([sequence]) for _ in range(6)) if step.shape[0]]
    assert torch.equal(torch.stack(in_chunks), alone)
