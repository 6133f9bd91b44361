"""Draws the tokens of one iteration: greedy rows all at once on the device, the others one by one (`row.py`).

Log-probabilities are those of the untouched logits, before bias, penalties and temperature, as vLLM reports them by
default.
"""

from collections.abc import Sequence

import torch

from fastserve_worker.sampling.params import DrawParams, TokenDraw
from fastserve_worker.sampling.row import draw_from_row


@torch.inference_mode()
def draw_tokens(logits: torch.Tensor, params: Sequence[DrawParams]) -> tuple[TokenDraw, ...]:
    """One draw per row of `logits`, float32 [rows, vocab], which is not changed.

    Greedy takes the lowest id among equals. Raises ValueError when a row leaves no token that could be drawn.
    """
    if len(params) != logits.shape[0]:
        raise ValueError(f"{len(params)} draws from {logits.shape[0]} rows of logits")
    if not params:
        return ()
    special = [index for index, row in enumerate(params) if row.changes_logits or row.temperature > 0]
    token_ids: list[int] = [0] * len(params) if len(special) == len(params) else logits.argmax(dim=-1).tolist()
    for index in special:
        token_ids[index] = draw_from_row(logits[index].cpu().numpy(), params[index])
    return tuple(
        TokenDraw(token_id) if row.logprobs is None else _with_logprobs(logits[index], token_id, row.logprobs)
        for index, (row, token_id) in enumerate(zip(params, token_ids, strict=True))
    )


def _with_logprobs(row: torch.Tensor, token_id: int, num_top: int) -> TokenDraw:
    logprobs = row.log_softmax(dim=-1)
    values, ids = logprobs.topk(min(num_top, len(row)))
    top = sorted(zip(ids.tolist(), values.tolist(), strict=True), key=lambda entry: (-entry[1], entry[0]))
    return TokenDraw(token_id, float(logprobs[token_id]), tuple(top))
