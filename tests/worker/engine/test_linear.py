"""Kinds of linear layers: what each one keeps exact, and where each one is allowed."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastserve_worker.engine.fused import FusedDecoderLayer
from fastserve_worker.engine.linear import OneDnnLinear, PackedLinear, replace_linears, resolve_kind
from fastserve_worker.engine.native import load_kernels
from fastserve_worker.engine.stage_model import StageModel

from .models import TinyModel

needs_kernels = pytest.mark.skipif(load_kernels() is None, reason="needs the native kernels")


def _model(weight: torch.Tensor) -> nn.Sequential:
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.weight.data.copy_(weight)
    return nn.Sequential(layer).requires_grad_(False)


def _weight_dtype(model: nn.Sequential) -> torch.dtype:
    assert isinstance(model[0], PackedLinear)
    return model[0].packed.panels.dtype


def test_auto_is_packed_only_where_it_is_exact_and_fast() -> None:
    assert resolve_kind("auto", torch.float32, torch.device("cpu")) == "packed"
    assert resolve_kind("auto", torch.bfloat16, torch.device("cpu")) == "torch"
    assert resolve_kind("auto", torch.float32, torch.device("cuda")) == "torch"
    with pytest.raises(ValueError, match="float32 on the CPU"):
        resolve_kind("packed", torch.bfloat16, torch.device("cpu"))


@needs_kernels
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
def test_packed_keeps_every_weight_in_the_smallest_dtype_that_holds_it(stored: torch.dtype) -> None:
    weight = torch.randn(33, 40, generator=torch.Generator().manual_seed(1)).to(stored).float()
    x = torch.randn(2, 3, 40)
    model = _model(weight)
    expected = model(x)
    replace_linears(model, "packed")
    assert _weight_dtype(model) == stored
    torch.testing.assert_close(model(x), expected)


@needs_kernels
def test_fp16_rounds_weights_but_not_those_out_of_its_range() -> None:
    weight = torch.randn(33, 40, generator=torch.Generator().manual_seed(1))
    x = torch.randn(5, 40)
    model = _model(weight)
    expected = model(x)
    replace_linears(model, "fp16")
    assert _weight_dtype(model) == torch.float16
    torch.testing.assert_close(model(x), expected, rtol=1e-2, atol=1e-2)
    assert not torch.equal(model(x), expected)
    large = _model(weight * 1e5)
    replace_linears(large, "fp16")
    assert _weight_dtype(large) == torch.float32


def test_onednn_layout_is_exact() -> None:
    weight, bias, x = torch.randn(33, 40), torch.randn(33), torch.randn(2, 7, 40)
    torch.testing.assert_close(OneDnnLinear(weight, bias)(x), F.linear(x, weight, bias))


@needs_kernels
@pytest.mark.parametrize(("name", "fused"), [("llama-gqa", 4), ("qwen3", 4), ("mistral-window", 4), ("opt", 0)])
def test_layers_of_the_form_are_fused(name: str, fused: int, tiny_model: Callable[[str], TinyModel]) -> None:
    stage = StageModel.load(
        tiny_model(name).folder, stage=0, num_stages=1, dtype=torch.float32, device=torch.device("cpu")
    )
    kinds = [type(module) for module in stage._model.modules()]
    assert kinds.count(FusedDecoderLayer) == fused
    assert nn.Linear not in kinds
