"""The one-call decoder layer: its constants and its batch as the C structures of `layer.cpp`."""

import ctypes
from dataclasses import dataclass

import torch

from fastserve_worker.engine.attention.params import AttentionParams
from fastserve_worker.engine.native.kernels import WEIGHT_KINDS, NativeKernels, PackedWeight

_PTR, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class _Weight(ctypes.Structure):
    _fields_ = (
        ("panels", _PTR),
        ("bias", _PTR),
        ("kind", _LONG),
        ("num_inputs", _LONG),
        ("num_outputs", _LONG),
    )


class _Norm(ctypes.Structure):
    _fields_ = (("weight", _PTR), ("epsilon", _FLOAT))


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Weight) for name in ("qkv", "output", "gate_up", "down")),
        *((name, _Norm) for name in ("input_norm", "mlp_norm", "query_norm", "key_norm")),
        *((name, _LONG) for name in ("num_heads", "num_kv_heads", "head_dim", "window")),
        *((name, _FLOAT) for name in ("scale", "softcap")),
    )


@dataclass(frozen=True, slots=True)
class NormWeight:
    """A root-mean-square norm: weight * x / sqrt(mean(x^2) + epsilon)."""

    weight: torch.Tensor
    epsilon: float


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """What a layer is made of. `qkv` and `gate_up` hold their parts' outputs one after another."""

    qkv: PackedWeight
    output: PackedWeight
    gate_up: PackedWeight
    down: PackedWeight
    input_norm: NormWeight
    mlp_norm: NormWeight
    query_norm: NormWeight | None
    key_norm: NormWeight | None


class NativeLayer:
    """One layer, ready to be called; keeps its tensors alive."""

    def __init__(
        self,
        kernels: NativeKernels,
        weights: LayerWeights,
        params: AttentionParams,
        *,
        num_kv_heads: int,
        head_dim: int,
    ) -> None:
        self._weights = weights
        self._function = kernels.decoder_layer
        self._struct = _Layer(
            *(_weight(w) for w in (weights.qkv, weights.output, weights.gate_up, weights.down)),
            *(_norm(n) for n in (weights.input_norm, weights.mlp_norm, weights.query_norm, weights.key_norm)),
            *(weights.output.num_inputs // head_dim, num_kv_heads, head_dim, params.window or 0),
            *(params.scale, params.softcap or 0.0),
        )
        self._address = ctypes.addressof(self._struct)

    def __call__(
        self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch_address: int, pool_layer: int
    ) -> torch.Tensor:
        """hidden [tokens, width], cos and sin [tokens, rotary_dim], all contiguous -> [tokens, width]."""
        result = torch.empty_like(hidden)
        self._function(
            *(self._address, batch_address, pool_layer, cos.data_ptr(), sin.data_ptr(), cos.shape[1]),
            *(hidden.data_ptr(), result.data_ptr(), torch.get_num_threads()),
        )
        return result


def _weight(weight: PackedWeight) -> _Weight:
    bias = None if weight.bias is None else weight.bias.data_ptr()
    kind = WEIGHT_KINDS[weight.panels.dtype]
    return _Weight(weight.panels.data_ptr(), bias, kind, weight.num_inputs, weight.num_outputs)


def _norm(norm: NormWeight | None) -> _Norm:
    return _Norm(None, 0.0) if norm is None else _Norm(norm.weight.data_ptr(), norm.epsilon)
