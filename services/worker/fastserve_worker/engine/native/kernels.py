"""Typed calls into the kernel library. Tensors are float32 on the CPU, last dimension contiguous.

Calls release the interpreter lock and use torch's number of intra-op threads; torch is imported first, so that both
share one OpenMP runtime.
"""

import ctypes
import logging
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from fastserve_worker.engine.native.compiler import KernelsUnavailableError, build

log = logging.getLogger(__name__)

#: "auto": use the kernels where they build, "require": fail where they do not, "off": plain torch.
MODE_VARIABLE = "FASTSERVE_KERNELS"
_MODES = ("auto", "require", "off")

PANEL_WIDTH = 16
MAX_HEAD_DIM = 512
BLOCK_SIZE = 16
#: How `linear.cpp` calls the dtypes of packed weights.
WEIGHT_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_PTR, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [num_outputs, num_inputs] in the layout of `linear.cpp`, with its bias."""

    panels: torch.Tensor
    num_inputs: int
    num_outputs: int
    bias: torch.Tensor | None


class BatchStruct(ctypes.Structure):
    """The tables of one iteration, as `layer.cpp` reads them."""

    _fields_ = (
        *((name, _LONG) for name in ("num_tokens", "num_rows", "max_blocks", "block_stride")),
        *((name, _PTR) for name in ("tables", "row_offsets", "ctx_lens")),
    )


class NativeKernels:
    """The functions of one loaded library."""

    def __init__(self, library: Path) -> None:
        lib = ctypes.CDLL(str(library))
        lib.fastserve_input_block.restype = _LONG
        self._input_block: int = lib.fastserve_input_block()
        self._linear = lib.fastserve_linear
        self._linear.argtypes = [_PTR, _LONG, _LONG, _PTR, _INT, _LONG, _LONG, _PTR, _PTR, _PTR, _LONG, _INT]
        self._attention = lib.fastserve_attention
        self._attention.argtypes = [
            *(_PTR, _LONG) * 3,
            *(_PTR, _LONG),
            *(_PTR, _LONG, _PTR, _PTR, _LONG),
            *(_LONG, _LONG, _LONG, _FLOAT, _FLOAT, _LONG),
            *(_PTR, _LONG, _INT),
        ]
        self._rms_norm = lib.fastserve_rms_norm
        self._rms_norm.argtypes = [_PTR, _LONG, _LONG, _LONG, _LONG, _PTR, _FLOAT, _PTR, _LONG, _INT]
        self._rotate = lib.fastserve_rotate
        self._rotate.argtypes = [_PTR, _LONG, _LONG, _LONG, _LONG, _LONG, _PTR, _PTR, _INT]
        self._silu_mul = lib.fastserve_silu_mul
        self._silu_mul.argtypes = [_PTR, _LONG, _LONG, _PTR, _INT]
        self.decoder_layer = lib.fastserve_decoder_layer
        self.decoder_layer.argtypes = [_PTR, _PTR, _PTR, _PTR, _PTR, _LONG, _PTR, _PTR, _INT]
        self.decoder_layer.restype = None
        for function in (self._linear, self._attention, self._rms_norm, self._rotate, self._silu_mul):
            function.restype = None

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedWeight:
        """Repack [num_outputs, num_inputs], keeping its dtype: float32, bfloat16 or float16."""
        num_outputs, num_inputs = weight.shape
        num_panels = -(-num_outputs // PANEL_WIDTH)
        padded = weight.new_zeros(num_panels * PANEL_WIDTH, num_inputs)
        padded[:num_outputs] = weight
        panels = padded.view(num_panels, PANEL_WIDTH, num_inputs)
        blocks = [block.transpose(1, 2).reshape(-1) for block in torch.split(panels, self._input_block, dim=2)]
        own_bias = None if bias is None else bias.detach().to(torch.float32, copy=True)
        return PackedWeight(torch.cat(blocks), num_inputs, num_outputs, own_bias)

    def linear(self, x: torch.Tensor, weight: PackedWeight, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x [rows, num_inputs] -> x W^T + bias + residual, [rows, num_outputs]. Bitwise the same in any batch."""
        rows = x.shape[0]
        y = x.new_empty(rows, weight.num_outputs)
        self._linear(
            *(x.data_ptr(), rows, x.stride(0)),
            *(weight.panels.data_ptr(), WEIGHT_KINDS[weight.panels.dtype], weight.num_inputs, weight.num_outputs),
            None if weight.bias is None else weight.bias.data_ptr(),
            None if residual is None else residual.data_ptr(),
            *(y.data_ptr(), weight.num_outputs, torch.get_num_threads()),
        )
        return y

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: BatchStruct,
        pool_layer: int,
        *,
        scale: float,
        softcap: float | None,
        window: int | None,
    ) -> torch.Tensor:
        """query [tokens, heads, head_dim], key and value [tokens, kv_heads, head_dim] -> like query, contiguous.

        `pool_layer`: address of the layer in the pool's first block.
        """
        tokens, heads, head_dim = query.shape
        output = query.new_empty(tokens, heads, head_dim)
        self._attention(
            *(query.data_ptr(), query.stride(0), key.data_ptr(), key.stride(0), value.data_ptr(), value.stride(0)),
            *(pool_layer, batch.block_stride, batch.tables, batch.max_blocks, batch.row_offsets, batch.ctx_lens),
            *(batch.num_rows, heads, key.shape[1], head_dim, scale, softcap or 0.0, window or 0),
            *(output.data_ptr(), heads * head_dim, torch.get_num_threads()),
        )
        return output

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """x [rows, width] -> weight * x / rms(x)."""
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        rows, width = x.shape
        self._rms_norm(
            *(x.data_ptr(), x.stride(0), rows, 1, width, weight.data_ptr(), epsilon),
            *(y.data_ptr(), width, torch.get_num_threads()),
        )
        return y

    def rms_norm_heads_(self, x: torch.Tensor, num_heads: int, weight: torch.Tensor, epsilon: float) -> None:
        """Normalise each of the `num_heads` vectors at the start of every row of x [rows, ...], in place."""
        width = weight.shape[0]
        self._rms_norm(
            *(x.data_ptr(), x.stride(0), x.shape[0], num_heads, width, weight.data_ptr(), epsilon),
            *(x.data_ptr(), x.stride(0), torch.get_num_threads()),
        )

    def rotate_(self, x: torch.Tensor, num_heads: int, head_dim: int, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotary embedding of the `num_heads` heads at the start of every row of x, in place; cos, sin [rows, dim]."""
        self._rotate(
            *(x.data_ptr(), x.stride(0), x.shape[0], num_heads, head_dim, cos.shape[1]),
            *(cos.data_ptr(), sin.data_ptr(), torch.get_num_threads()),
        )

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[rows, 2 * width], gate before up -> silu(gate) * up, [rows, width]."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        y = gate_up.new_empty(rows, width)
        self._silu_mul(gate_up.data_ptr(), rows, width, y.data_ptr(), torch.get_num_threads())
        return y


def load_kernels() -> NativeKernels | None:
    """The kernels of this process, or None where plain torch must do. Warns once when they are missing."""
    return _load(os.environ.get(MODE_VARIABLE, "auto"))


@cache
def _load(mode: str) -> NativeKernels | None:
    if mode not in _MODES:
        raise ValueError(f"{MODE_VARIABLE} must be one of {', '.join(_MODES)}, not {mode!r}")
    if mode == "off":
        return None
    try:
        return NativeKernels(build())
    except (KernelsUnavailableError, OSError) as error:
        if mode == "require":
            raise
        log.warning("native kernels are off, plain torch is several times slower: %s", error)
        return None
