"""Preempting at every position, by recomputation and by moving blocks, never changes an answer."""

from collections.abc import Callable

import pytest
import torch

from fastserve_worker.engine.offline import OfflinePipeline, OfflineSequence

from .models import MODEL_CONFIGS, TinyModel

NUM_BLOCKS = 24
QUICK = ["opt", "llama-gqa", "mistral-window", "gemma3"]
MATRIX = [(name, 2) for name in QUICK] + [
    pytest.param(name, num_stages, marks=pytest.mark.full) for name in MODEL_CONFIGS for num_stages in (1, 2, 3)
]


def _poison_free_blocks(pipeline: OfflinePipeline, owners: list[OfflineSequence]) -> None:
    """Fill every block that nobody owns with NaN: whoever reads what it did not write shows it."""
    owned = {block for owner in owners for block in owner.blocks}
    free = [block for block in range(NUM_BLOCKS) if block not in owned]
    for pool in pipeline.pools:
        pool.data[torch.tensor(free)] = float("nan")


def _swap(pipeline: OfflinePipeline, victim: OfflineSequence, other: OfflineSequence) -> None:
    before = list(victim.blocks)
    pipeline.swap_out(victim)
    _poison_free_blocks(pipeline, [other])
    pipeline.step([other])
    pipeline.swap_in(victim)
    assert set(victim.blocks).isdisjoint(before)


def _recompute(pipeline: OfflinePipeline, victim: OfflineSequence, other: OfflineSequence) -> None:
    pipeline.preempt_by_recompute(victim)
    _poison_free_blocks(pipeline, [other])
    pipeline.step([other])


@pytest.mark.parametrize("preempt", [_swap, _recompute])
@pytest.mark.parametrize(("name", "num_stages"), MATRIX)
def test_preempted_at_every_position(
    name: str,
    num_stages: int,
    preempt: Callable[[OfflinePipeline, OfflineSequence, OfflineSequence], None],
    tiny_model: Callable[[str], TinyModel],
) -> None:
    """The victim is preempted in its prefill and after each of its tokens, while a neighbour runs on."""
    model = tiny_model(name)
    pipeline = OfflinePipeline.load(model.folder, num_stages=num_stages, num_blocks=NUM_BLOCKS, chunk_tokens=9)
    _poison_free_blocks(pipeline, [])
    victim = pipeline.add(model.prompts[1], len(model.expected[1]))
    neighbour = pipeline.add(model.prompts[2], 90)
    preemptions, reached = 0, -1
    while not victim.done:
        pipeline.step([neighbour, victim])
        if len(victim.output) > reached and not victim.done:  # each position once: recomputing starts over
            reached = len(victim.output)
            preempt(pipeline, victim, neighbour)
            preemptions += 1
    assert victim.output == model.expected[1]
    assert neighbour.output[:14] == model.expected[2]
    assert preemptions == len(model.expected[1])
