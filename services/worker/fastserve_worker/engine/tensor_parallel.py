"""The layers of a stage divided among ranks: each has a share of the heads and of the hidden units, and its KV.

Which linear layers are cut, and which way, is transformers' own plan for the model (`base_model_tp_plan`). A layer cut
by its outputs computes a share of them; the one behind it is cut by its inputs, so each rank has a part of every sum,
and the parts are added up. Embedding, norms and vocabulary head are whole on every rank that uses them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedConfig

from fastserve_worker.engine.errors import UnsupportedModelError

_BY_OUTPUTS, _BY_INPUTS = "colwise", "rowwise"


class Ranks(Protocol):
    """The ranks of one stage, as their computing threads see each other. Every rank makes the same calls in order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def add_up(self, part: torch.Tensor) -> None:
        """Replace every rank's `part` by the sum of all."""

    def share(self, tensor: torch.Tensor) -> None:
        """Replace every rank's `tensor` by that of rank 0."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's piece of a stored tensor: an equal part of dimension `dim`."""

    dim: int
    rank: int
    size: int

    def read(self, stored: Any) -> torch.Tensor:  # noqa: ANN401 - safetensors ships no type for a slice
        """Reads this piece alone. `stored`: a slice of safetensors."""
        length = stored.get_shape()[self.dim] // self.size
        piece = slice(self.rank * length, (self.rank + 1) * length)
        tensor: torch.Tensor = stored[piece] if self.dim == 0 else stored[:, piece]
        return tensor.contiguous()


class SummedLinear(nn.Module):
    """A linear layer of which each rank has a share of the inputs."""

    def __init__(self, share: nn.Module, ranks: Ranks) -> None:
        super().__init__()
        self.share = share
        self._ranks = ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs of this rank] -> [..., outputs], summed over the ranks."""
        part: torch.Tensor = self.share(x).contiguous()
        self._ranks.add_up(part)
        return part


def check(config: PreTrainedConfig, num_ranks: int) -> None:
    """Raises UnsupportedModelError for a model that cannot be divided so."""
    if not _plan(config):
        raise UnsupportedModelError(f"{config.model_type} has no tensor-parallel plan in transformers; use more stages")
    heads = int(config.num_attention_heads)
    counts = {"attention heads": heads, "KV heads": int(getattr(config, "num_key_value_heads", None) or heads)}
    for name, count in counts.items():
        if count % num_ranks:
            raise UnsupportedModelError(f"{config.model_type} has {count} {name}, which {num_ranks} ranks cannot share")


def _plan(config: PreTrainedConfig) -> Mapping[str, str]:
    return config.base_model_tp_plan or {}


def divide(base: nn.Module, config: PreTrainedConfig, ranks: Ranks) -> dict[str, Shard]:
    """Shrink the linear layers of a skeleton, in place, to this rank's share.

    Returns the pieces to load, by parameter name within `base`. Raises UnsupportedModelError where units are left over.
    """
    plan = _plan(config)
    shards: dict[str, Shard] = {}
    for name, module in list(base.named_modules()):
        style = plan.get(re.sub(r"\.\d+\.", ".*.", name))
        if style not in (_BY_OUTPUTS, _BY_INPUTS) or not isinstance(module, nn.Linear):
            continue
        dim = 0 if style == _BY_OUTPUTS else 1
        length = module.weight.shape[dim]
        if length % ranks.size:
            raise UnsupportedModelError(f"{name} has {length} units, which {ranks.size} ranks cannot share")
        shard = Shard(dim, ranks.rank, ranks.size)
        shards[f"{name}.weight"] = shard
        module.weight = _narrowed(module.weight, dim, length // ranks.size)
        if dim == 0:
            module.out_features = length // ranks.size
            if module.bias is not None:
                shards[f"{name}.bias"] = shard
                module.bias = _narrowed(module.bias, 0, length // ranks.size)
        else:
            module.in_features = length // ranks.size
    return shards


def _narrowed(parameter: torch.Tensor, dim: int, length: int) -> nn.Parameter:
    return nn.Parameter(parameter.detach().narrow(dim, 0, length), requires_grad=False)


def add_up_sums(base: nn.Module, config: PreTrainedConfig, ranks: Ranks) -> None:
    """After loading: the layers cut by their inputs give whole sums from now on. A bias is added once, by rank 0."""
    plan = _plan(config)
    for name, module in list(base.named_modules()):
        if plan.get(re.sub(r"\.\d+\.", ".*.", name)) == _BY_INPUTS and isinstance(module, nn.Linear):
            if module.bias is not None and ranks.rank:
                module.register_parameter("bias", None)
            parent, _, leaf = name.rpartition(".")
            setattr(base.get_submodule(parent), leaf, SummedLinear(module, ranks))
