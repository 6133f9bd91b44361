"""Decoder layers of Llama's form as one native call instead of some forty torch operations.

A layer is recognised by its parts and replaced only after it was shown to compute the same: both forms run on the
same input, and what differs by more than rounding is left as transformers wrote it. So a new variant of the form
(another norm, positions on some layers only, a scaled residual) costs speed, never an answer.
"""

import logging
from typing import cast

import torch
from torch import nn

from fastserve_worker.engine.attention.native import supports
from fastserve_worker.engine.attention.params import AttentionParams
from fastserve_worker.engine.batch import BatchRow, PagedBatch
from fastserve_worker.engine.kv_pool import KvPool
from fastserve_worker.engine.linear import pack
from fastserve_worker.engine.native import NativeKernels
from fastserve_worker.engine.native.layer import LayerWeights, NativeLayer, NormWeight

log = logging.getLogger(__name__)

_PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP_PARTS = ("gate_proj", "up_proj", "down_proj")
#: Rounding of a layer in float32, relative to its largest output; a wrong formula is off by far more.
_TOLERANCE = 1e-4
_PROBE_TOKENS = 5


class FusedDecoderLayer(nn.Module):
    """norm, qkv, rotation, attention, output + residual, norm, gate and up, silu, down + residual."""

    def __init__(
        self, layer: nn.Module, kernels: NativeKernels, pool: KvPool, params: AttentionParams, linear_kind: str
    ) -> None:
        """`pool`: one with the shape of the pools that batches will bring; `params`: of this layer's attention."""
        super().__init__()
        attention, mlp = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
        has_norms = hasattr(attention, "q_norm")
        weights = LayerWeights(
            qkv=pack(kernels, _linears(attention, _PROJECTIONS[:3]), linear_kind),
            output=pack(kernels, _linears(attention, _PROJECTIONS[3:]), linear_kind),
            gate_up=pack(kernels, _linears(mlp, _MLP_PARTS[:2]), linear_kind),
            down=pack(kernels, _linears(mlp, _MLP_PARTS[2:]), linear_kind),
            input_norm=_norm(layer.get_submodule("input_layernorm")),
            mlp_norm=_norm(layer.get_submodule("post_attention_layernorm")),
            query_norm=_norm(attention.get_submodule("q_norm")) if has_norms else None,
            key_norm=_norm(attention.get_submodule("k_norm")) if has_norms else None,
        )
        self._layer = int(attention.layer_idx)  # type: ignore[arg-type]  # nn.Module types attributes as tensors
        self._shape = (pool.num_kv_heads, pool.head_dim, pool.block_size, pool.dtype, pool.device)
        self._run = NativeLayer(kernels, weights, params, num_kv_heads=pool.num_kv_heads, head_dim=pool.head_dim)

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        paged: PagedBatch,
        **_: object,
    ) -> torch.Tensor:
        """[1, tokens, hidden] -> [1, tokens, hidden]."""
        pool, (cos, sin) = paged.pool, position_embeddings
        if (pool.num_kv_heads, pool.head_dim, pool.block_size, pool.dtype, pool.device) != self._shape:
            raise ValueError("fused layers need a float32 CPU pool of this model with blocks of 16 tokens")
        hidden = hidden_states[0].contiguous()
        address = pool.layer_address(self._layer)
        return self._run(hidden, cos[0].contiguous(), sin[0].contiguous(), paged.struct_address, address)[None]


class FusedRmsNorm(nn.Module):
    """weight * x / rms(x) over the last dimension."""

    def __init__(self, norm: nn.Module, kernels: NativeKernels) -> None:
        super().__init__()
        self._kernels = kernels
        self._norm = _norm(norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any leading dimensions."""
        flat = x.reshape(-1, x.shape[-1])
        return self._kernels.rms_norm(flat, self._norm.weight, self._norm.epsilon).view(x.shape)


def fuse_layers(base: nn.Module, layers: nn.ModuleList, kernels: NativeKernels, pool: KvPool, linear_kind: str) -> int:
    """Replace the layers of `base` that prove equal, in place; returns how many. `pool` is a small scratch pool."""
    if not supports(pool):
        return 0
    fused = 0
    for index, layer in enumerate(layers):
        candidate = _equal_candidate(base, layer, kernels, pool, linear_kind) if _has_the_form(layer) else None
        if candidate is not None:
            layers[index] = candidate
            fused += 1
    if fused < len(layers):
        log.info("%d of %d layers keep their torch form", len(layers) - fused, len(layers))
    return fused


def fuse_norms(model: nn.Module, kernels: NativeKernels) -> None:
    """Replace root-mean-square norms, in place, where the native form proves equal."""
    for parent in list(model.modules()):
        for name, module in parent.named_children():
            if not _is_rms_norm(module):
                continue
            candidate = FusedRmsNorm(module, kernels)
            width = candidate._norm.weight.shape[0]
            probe = torch.randn(2, 3, width, generator=torch.Generator().manual_seed(0))
            if _close(candidate(probe), module(probe)):
                setattr(parent, name, candidate)


def _has_the_form(layer: nn.Module) -> bool:
    if not all(isinstance(getattr(layer, part, None), nn.Module) for part in _PARTS):
        return False
    attention, mlp = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
    linears = [getattr(attention, name, None) for name in _PROJECTIONS] + [getattr(mlp, n, None) for n in _MLP_PARTS]
    norms = [layer.get_submodule("input_layernorm"), layer.get_submodule("post_attention_layernorm")]
    return all(isinstance(module, nn.Linear) for module in linears) and all(_is_rms_norm(norm) for norm in norms)


def _is_rms_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return type(module).__name__.endswith("RMSNorm") and isinstance(weight, torch.Tensor) and weight.ndim == 1


def _norm(module: nn.Module) -> NormWeight:
    epsilon = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None) or 0.0
    weight = cast(torch.Tensor, module.weight).detach().clone()  # a view would keep the weight file mapped
    # Gemma's classes keep the distance from 1. Either form is tried on numbers before it is used.
    if type(module).__name__.startswith("Gemma"):
        weight = weight + 1.0
    return NormWeight(weight, float(epsilon))


def _linears(module: nn.Module, names: tuple[str, ...]) -> list[nn.Linear]:
    return [cast(nn.Linear, module.get_submodule(name)) for name in names]


def _equal_candidate(
    base: nn.Module, layer: nn.Module, kernels: NativeKernels, pool: KvPool, linear_kind: str
) -> FusedDecoderLayer | None:
    """The fused form of a layer if it computes the same, else None."""
    batch = PagedBatch([BatchRow(0, _PROBE_TOKENS, [0], sample=False)], pool)
    seen: list[AttentionParams] = []
    batch.on_attention = seen.append
    width = cast(torch.Tensor, layer.get_submodule("input_layernorm").weight).shape[0]
    hidden = torch.randn(1, _PROBE_TOKENS, width, generator=torch.Generator().manual_seed(0))
    try:
        rotary = base.get_submodule("rotary_emb")
        embeddings = rotary(hidden, position_ids=batch.positions[None])
        expected = layer(hidden, position_embeddings=embeddings, paged=batch)
        exact = FusedDecoderLayer(layer, kernels, pool, seen[0], "packed")
        if not _close(exact(hidden, position_embeddings=embeddings, paged=batch), expected):
            return None
        return exact if linear_kind == "packed" else FusedDecoderLayer(layer, kernels, pool, seen[0], linear_kind)
    except (TypeError, AttributeError, RuntimeError) as error:
        log.info("%s keeps its torch form: %s", type(layer).__name__, error)
        return None


def _close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return bool((ours - theirs).abs().max() <= _TOLERANCE * theirs.abs().max())
