"""The function that transformers calls for the attention of every layer."""

import torch
from torch import nn
from transformers import AttentionInterface

from fastserve_worker.engine.attention import native, reference
from fastserve_worker.engine.attention.params import AttentionParams
from fastserve_worker.engine.batch import PagedBatch
from fastserve_worker.engine.errors import UnsupportedModelError
from fastserve_worker.engine.native import load_kernels

#: Not registered with transformers' mask interface, so its models build no masks at all.
ATTENTION_NAME = "fastserve_paged"


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    batch: PagedBatch,
    params: AttentionParams,
) -> torch.Tensor:
    """Store K and V of the new tokens, then attend over each row's context, by kernel where there is one.

    query [tokens, heads, head_dim], key and value [tokens, kv_heads, head_dim] -> like query.
    """
    pool = batch.pool
    if key.shape[1:] != (pool.num_kv_heads, pool.head_dim) or value.shape != key.shape:
        raise UnsupportedModelError(
            f"layer {layer} has keys {tuple(key.shape[1:])} and values {tuple(value.shape[1:])} per token, "
            f"the pool was made for ({pool.num_kv_heads}, {pool.head_dim})"
        )
    kernels = load_kernels() if query.dtype == torch.float32 and native.supports(pool) else None
    if kernels is None:
        return reference.attend(query, key, value, layer, batch, params)
    return native.attend(kernels, query, key, value, layer, batch, params)


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: PagedBatch,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **extra: object,
) -> tuple[torch.Tensor, None]:
    """query [1, heads, tokens, head_dim], key and value [1, kv_heads, tokens, head_dim], tokens packed over sequences.

    Returns [1, tokens, heads, head_dim]. Masks are not taken: causality and windows follow from positions.
    """
    if attention_mask is not None or extra.get("s_aux") is not None:
        raise UnsupportedModelError(f"{type(module).__name__} wants an attention mask or sinks, which are not paged")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    params = AttentionParams(scale=scale, window=sliding_window, softcap=softcap)
    if paged.on_attention is not None:
        paged.on_attention(params)
    output = attend(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        int(module.layer_idx),  # type: ignore[arg-type]  # nn.Module types attributes as tensors
        paged,
        params,
    )
    return output[None], None


AttentionInterface.register(ATTENTION_NAME, paged_attention)
