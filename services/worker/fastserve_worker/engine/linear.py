"""Linear layers for the CPU: what stock torch does badly at the few rows of a decode batch.

torch   F.linear.
packed  weights repacked once; exact: the same products and sums in float32 as F.linear, in another order.
        A weight is stored in 16 bits when that loses nothing, as with checkpoints kept in bfloat16.
fp16    packed, and every weight rounded to float16: half the bytes to stream, answers may differ.
auto    packed on a CPU in float32, torch otherwise.
"""

from typing import cast

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from fastserve_worker.engine.native import NativeKernels, load_kernels
from fastserve_worker.engine.native.kernels import PackedWeight

LINEAR_KINDS = ("auto", "torch", "packed", "fp16")
_LARGEST_FP16 = 65504.0
#: Rows for which oneDNN lays out its weights: small decode batches.
_ONEDNN_ROWS = 16


class PackedLinear(nn.Module):
    """A linear layer on the native kernel."""

    def __init__(self, kernels: NativeKernels, weight: PackedWeight) -> None:
        super().__init__()
        self._kernels = kernels
        self.packed = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., num_inputs] -> [..., num_outputs]."""
        flat = x.reshape(-1, self.packed.num_inputs)
        return self._kernels.linear(flat, self.packed).view(*x.shape[:-1], self.packed.num_outputs)


class OneDnnLinear(nn.Module):
    """A linear layer on weights that oneDNN has laid out beforehand: exact, for machines without a compiler."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _ONEDNN_ROWS)
        self._bias = None if bias is None else bias.detach().clone()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., num_inputs] -> [..., num_outputs]."""
        return cast(torch.Tensor, torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], ""))


def resolve_kind(kind: str, dtype: torch.dtype, device: torch.device) -> str:
    """What `auto` means here. Raises ValueError for an unknown kind, or one that the dtype or device rules out."""
    if kind not in LINEAR_KINDS:
        raise ValueError(f"linear layers are one of {', '.join(LINEAR_KINDS)}, not {kind!r}")
    packable = dtype == torch.float32 and device.type == "cpu"
    if kind == "auto":
        return "packed" if packable else "torch"
    if kind != "torch" and not packable:
        raise ValueError(f"{kind} linear layers are for float32 on the CPU, not {dtype} on {device.type}")
    return kind


def replace_linears(model: nn.Module, kind: str) -> None:
    """Swap all linear layers of the model, in place, by those of a kind that `resolve_kind` returned."""
    if kind == "torch":
        return
    kernels = load_kernels()
    if kernels is None and kind == "fp16":
        raise ValueError("fp16 linear layers need the native kernels, which this machine does not have")
    for parent in list(model.modules()):
        for name, module in parent.named_children():
            if isinstance(module, nn.Linear | Conv1D):
                setattr(parent, name, _packed(kernels, module, kind))


def pack(kernels: NativeKernels, layers: list[nn.Linear], kind: str) -> PackedWeight:
    """Layers with the same input as one weight, their outputs one after another."""
    weight = torch.cat([layer.weight for layer in layers])
    biases = [layer.bias for layer in layers]
    if all(bias is None for bias in biases):
        return kernels.pack(_narrow(weight, kind), None)
    filled: list[torch.Tensor] = [
        layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias for layer in layers
    ]
    return kernels.pack(_narrow(weight, kind), torch.cat(filled))


def _packed(kernels: NativeKernels | None, module: nn.Linear | Conv1D, kind: str) -> nn.Module:
    weight = module.weight.T if isinstance(module, Conv1D) else module.weight
    if kernels is not None:
        return PackedLinear(kernels, kernels.pack(_narrow(weight, kind), module.bias))
    if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return OneDnnLinear(weight.contiguous(), module.bias)
    return module


def _narrow(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """The weight in the smallest dtype that `kind` allows."""
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(weight.to(dtype).float(), weight):
            return weight.to(dtype)
    if kind == "fp16" and weight.abs().max() <= _LARGEST_FP16:
        return weight.to(torch.float16)
    return weight
