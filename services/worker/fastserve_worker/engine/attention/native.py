"""Paged attention by the native kernel: float32 KV in blocks of 16 tokens on the CPU."""

import torch

from fastserve_worker.engine.attention.params import AttentionParams
from fastserve_worker.engine.batch import PagedBatch
from fastserve_worker.engine.kv_pool import KvPool
from fastserve_worker.engine.native.kernels import BLOCK_SIZE, MAX_HEAD_DIM, NativeKernels


def supports(pool: KvPool) -> bool:
    """Whether the kernel can work on this pool."""
    return (
        pool.device.type == "cpu"
        and pool.dtype == torch.float32
        and pool.block_size == BLOCK_SIZE
        and pool.head_dim % 8 == 0
        and pool.head_dim <= MAX_HEAD_DIM
    )


def attend(
    kernels: NativeKernels,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    batch: PagedBatch,
    params: AttentionParams,
) -> torch.Tensor:
    """As `reference.attend`. Heads of a token must lie next to each other, as projections leave them."""
    return kernels.attention(
        _heads_together(query),
        _heads_together(key),
        _heads_together(value),
        batch.struct,
        batch.pool.layer_address(layer),
        scale=params.scale,
        softcap=params.softcap,
        window=params.window,
    )


def _heads_together(states: torch.Tensor) -> torch.Tensor:
    _, _, head_dim = states.shape
    together = states.stride(2) == 1 and (states.shape[1] == 1 or states.stride(1) == head_dim)
    return states if together else states.contiguous()
