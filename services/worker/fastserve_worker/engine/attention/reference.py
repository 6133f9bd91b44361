"""Paged attention in plain torch: the oracle of the kernels, and the implementation on devices without one.

One sequence after another, over a gathered copy of its own context: never a gather padded to the longest one.
"""

import torch
import torch.nn.functional as F

from fastserve_worker.engine.attention.params import AttentionParams
from fastserve_worker.engine.batch import PagedBatch


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    batch: PagedBatch,
    params: AttentionParams,
) -> torch.Tensor:
    """Store K and V of the new tokens, then attend row by row. Shapes as in `interface.attend`."""
    batch.pool.write(layer, batch.token_blocks, batch.token_offsets, key, value)
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    for row, (begin, q_len, ctx_len) in enumerate(zip(batch.row_begins, batch.q_lens, batch.ctx_lens, strict=True)):
        new = slice(begin, begin + q_len)
        if q_len == ctx_len:  # the chunk is the whole context: nothing to gather
            row_key, row_value = key[new].transpose(0, 1), value[new].transpose(0, 1)
        else:
            row_key, row_value = batch.pool.gather(layer, batch.blocks_of(row), ctx_len)
        row_query = query[new].transpose(0, 1)
        output[new] = _attend_row(row_query, row_key.to(query.dtype), row_value.to(query.dtype), params).transpose(0, 1)
    return output


def _attend_row(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams) -> torch.Tensor:
    """query [heads, q_len, head_dim] at the end of a context key, value [kv_heads, ctx_len, head_dim]."""
    heads, q_len, _ = query.shape
    kv_heads, ctx_len, _ = key.shape
    visible = _visible(q_len, ctx_len, params.window, query.device)
    if params.softcap is None:
        # Batch dimension [1]: the 4-D form is the one with fused kernels.
        output = F.scaled_dot_product_attention(
            query[None], key[None], value[None], attn_mask=visible, scale=params.scale, enable_gqa=heads != kv_heads
        )
        return output[0]
    grouped = query.reshape(kv_heads, -1, q_len, query.shape[-1])
    scores = params.softcap * torch.tanh(grouped @ key[:, None].transpose(-1, -2) * params.scale / params.softcap)
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    return (scores.float().softmax(-1).to(value.dtype) @ value[:, None]).reshape(query.shape)


def _visible(q_len: int, ctx_len: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """[q_len, ctx_len] true where a query sees a key; None when it sees all."""
    if q_len == 1 and (window is None or ctx_len <= window):
        return None
    query_at = torch.arange(ctx_len - q_len, ctx_len, device=device)[:, None]
    key_at = torch.arange(ctx_len, device=device)[None, :]
    visible = key_at <= query_at
    if window is not None:
        visible &= key_at > query_at - window
    return visible
