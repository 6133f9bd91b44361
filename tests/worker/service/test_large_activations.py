"""Activations beyond the message cap cross in chunks, whole and unchanged, while small messages pass between them."""

import dataclasses

import numpy as np

from fastserve_common.channels import MAX_MESSAGE_BYTES
from fastserve_worker.codec import ACTIVATION_CHUNK_BYTES
from fastserve_worker.fake_stage import FakeStage
from fastserve_worker.messages import Activations, Plan, StageOutput
from fastserve_worker.sampling.params import TokenDraw

from .rig import pipeline_of

_HIDDEN_SIZE = 4096
_NUM_TOKENS = MAX_MESSAGE_BYTES // (4 * _HIDDEN_SIZE) + 500


def _pattern(num_tokens: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    return np.arange(num_tokens * _HIDDEN_SIZE, dtype=np.uint32) * np.uint32(2654435761)


class _WideStage(FakeStage):
    """Makes a pattern on the first stage; the last draws token 1 for exactly that pattern, else 0."""

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__(stage=stage, num_stages=num_stages, num_blocks=1024, max_model_len=16_000)
        self.info = dataclasses.replace(self.info, hidden_size=_HIDDEN_SIZE)

    def run(self, plan: Plan, activations: Activations | None) -> StageOutput:
        expected = _pattern(plan.num_tokens)
        if activations is None:
            return StageOutput(1, hidden=expected.tobytes())
        same = np.array_equal(np.frombuffer(activations.data, dtype=np.uint32), expected)
        return StageOutput(1, draws=tuple(TokenDraw(int(same)) for row in plan.rows if row.draw))


async def test_a_tensor_above_the_message_cap_arrives_whole() -> None:
    assert _NUM_TOKENS * _HIDDEN_SIZE * 4 > MAX_MESSAGE_BYTES > ACTIVATION_CHUNK_BYTES
    async with pipeline_of(_WideStage, 2) as pipeline:
        large, small = pipeline.job([5] * _NUM_TOKENS, 4), pipeline.job([5], 4)
        answers = await pipeline.generate([large, small], 3)
    assert answers == [[1, 1, 1], [1, 1, 1]]
