"""Makes a loaded stage fast on the CPU: fused layers where they prove equal, repacked weights everywhere else."""

from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel

from fastserve_worker.engine.architectures import Architecture
from fastserve_worker.engine.fused import fuse_layers, fuse_norms
from fastserve_worker.engine.kv_pool import KvPool
from fastserve_worker.engine.linear import replace_linears
from fastserve_worker.engine.native import load_kernels
from fastserve_worker.engine.shape import ModelShape


@torch.inference_mode()
def optimise(model: PreTrainedModel, arch: Architecture, shape: ModelShape, linear_kind: str) -> None:
    """Replace modules of a loaded stage in place; `linear_kind` as `linear.resolve_kind` returned it."""
    if linear_kind == "torch":
        return
    kernels = load_kernels()
    if kernels is not None:
        base = model.get_submodule(arch.base)
        layers = cast(nn.ModuleList, getattr(base, arch.layers))
        scratch = KvPool.for_model(shape, num_blocks=1, device=torch.device("cpu"))
        fuse_layers(base, layers, kernels, scratch, linear_kind)
        fuse_norms(model, kernels)
    replace_linears(model, linear_kind)
