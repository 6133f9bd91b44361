"""Builds one stage's part of a transformers decoder: a skeleton without memory, cut by layers, then its weights."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import cast

import torch
from accelerate import init_empty_weights  # type: ignore[import-untyped]  # accelerate ships no types
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from fastserve_worker.engine.architectures import Architecture, architecture_of
from fastserve_worker.engine.attention.interface import ATTENTION_NAME
from fastserve_worker.engine.checkpoint import Checkpoint
from fastserve_worker.engine.errors import UnsupportedModelError
from fastserve_worker.engine.partition import split_layers
from fastserve_worker.engine.tensor_parallel import Shard

#: Kinds of layers whose state is per-token K and V. Anything else (recurrent state, chunked masks) has no paged form.
_PAGED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})

#: Prefixes that checkpoints put before, or leave out of, a text decoder's tensor names.
_NAME_PREFIXES = ("model.", "transformer.", "gpt_neox.")
_MULTIMODAL_PREFIX = "language_model."


class NoPositions(nn.Module):
    """Stands for learned positions on stages after the first, where hidden states already carry them."""

    def forward(self, *_: object, **__: object) -> torch.Tensor:
        """Adds nothing."""
        return torch.zeros(())


def read_config(model_dir: Path) -> PreTrainedConfig:
    """The text decoder's configuration; raises UnsupportedModelError for what has no paged decoder form."""
    try:
        whole = AutoConfig.from_pretrained(model_dir)
    except (ValueError, OSError, KeyError) as error:
        raise UnsupportedModelError(f"the configuration in {model_dir.name!r} cannot be used: {error}") from error
    if whole.is_encoder_decoder:
        raise UnsupportedModelError(f"{whole.model_type} is an encoder-decoder; only decoders are served")
    config = cast(PreTrainedConfig, whole.get_text_config(decoder=True))
    unpaged = set(getattr(config, "layer_types", None) or ()) - _PAGED_LAYER_TYPES
    if unpaged:
        raise UnsupportedModelError(f"{config.model_type} has layers without paged KV: {', '.join(sorted(unpaged))}")
    if getattr(config, "num_kv_shared_layers", 0):
        raise UnsupportedModelError(f"{config.model_type} shares KV between layers, which a cut by layers would break")
    return config


def build_skeleton(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The whole model without memory: parameters on the meta device, computed buffers (rope) real."""
    try:
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]  # transformers leaves it untyped
                copy.deepcopy(config), dtype=dtype, attn_implementation=ATTENTION_NAME
            )
    except (ValueError, TypeError, KeyError) as error:  # KeyError: classes with a fixed table of attentions
        raise UnsupportedModelError(f"{config.model_type} cannot be built as a causal decoder: {error}") from error
    if not model._supports_attention_backend:
        raise UnsupportedModelError(f"{config.model_type} does not take its attention from transformers' interface")
    return cast(PreTrainedModel, model.eval().requires_grad_(False))


def layer_costs(model: PreTrainedModel, arch: Architecture) -> tuple[list[int], int]:
    """What an iteration costs in each layer and in the vocabulary head, in parameters of a layer.

    The head counts half: prompts pass it at one position only, and decoding it is one large product without
    attention (the demo model's, of eight layers' parameters, took the time of 5.3 layers at batch 8).
    """
    head = _head(model)
    return [_num_parameters(layer) for layer in _layers(model, arch)], _num_parameters(head) // 2


def cut(model: PreTrainedModel, arch: Architecture, layers: range, *, draws: bool = True) -> None:
    """Keep `layers` of the skeleton, in place, renumbered from 0; parts of other stages become pass-throughs.

    `draws`: whether the last stage keeps its vocabulary head.
    """
    base = model.get_submodule(arch.base)
    kept = [_layers(model, arch)[index] for index in layers]
    num_layers = len(_layers(model, arch))
    for index, layer in enumerate(kept):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = index  # type: ignore[assignment]  # nn.Module types attributes as tensors
    setattr(base, arch.layers, nn.ModuleList(kept))
    # The skeleton has its own copy of the configuration: forward() reads per-layer kinds from it by local index.
    for config in {id(c): c for c in (model.config, cast(PreTrainedModel, base).config)}.values():
        config.num_hidden_layers = len(kept)
        if getattr(config, "layer_types", None):
            config.layer_types = list(config.layer_types)[layers.start : layers.stop]
    if layers.start > 0:
        _bypass(base, (arch.embedding, *arch.before_layers))
        if arch.positions is not None:
            setattr(base, arch.positions, NoPositions())
    if layers.stop < num_layers:
        _bypass(base, arch.after_layers)
    if layers.stop < num_layers or not draws:
        setattr(*_parent_of(model, head_name(model)), nn.Identity())


def load_weights(
    model: PreTrainedModel,
    arch: Architecture,
    layers: range,
    checkpoint: Checkpoint,
    device: torch.device,
    shards: Mapping[str, Shard] = MappingProxyType({}),
) -> None:
    """Fill the cut skeleton from the checkpoint, reading only the tensors that it has parameters for.

    `shards`: the pieces of those that are divided among ranks, by their names in the base model.
    """
    wanted = {}
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    head_weight = f"{head_name(model)}.weight"
    for name, parameter in model.named_parameters(remove_duplicate=False):
        stored = _stored_name(name, arch, layers.start)
        candidates = _spellings(stored)
        if name == head_weight and tied:
            candidates = _spellings(f"{arch.base}.{arch.embedding}.weight")
        elif name == head_weight and arch.stored_head is not None:
            candidates.append(arch.stored_head)
        found = checkpoint.find(candidates)
        if found is None:
            raise UnsupportedModelError(f"the checkpoint has no tensor {stored!r} {tuple(parameter.shape)}")
        wanted[name] = found
    pieces = {f"{arch.base}.{name}": shard for name, shard in shards.items()}
    state = checkpoint.load(wanted, model.dtype, device, pieces)
    _check_shapes(model, state)
    model.load_state_dict(state, strict=False, assign=True)
    nn.Module.to(model, device)  # transformers' own to() has no types
    left = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if left:
        raise UnsupportedModelError(f"{model.config.model_type}: no weights for {', '.join(left[:5])}")


def leave_files(model: PreTrainedModel) -> None:
    """Copy what is still mapped from weight files: a page dropped by the system would be read again mid-iteration."""
    copies: dict[int, torch.Tensor] = {}
    for parameter in model.parameters():
        parameter.data = copies.setdefault(parameter.data_ptr(), parameter.data.clone())


def check_passes_hidden_states_through(model: PreTrainedModel, arch: Architecture) -> None:
    """Prove that the class adds nothing between the stages' layers: with no layers, hidden states come out as given.

    Some classes scale embeddings inside forward(); a later stage would scale its hidden states again, silently.
    """
    base = cast(PreTrainedModel, model.get_submodule(arch.base))
    layers = getattr(base, arch.layers)
    after = {name: getattr(base, name) for name in arch.after_layers}
    hidden = torch.randn(
        1, 3, model.config.hidden_size, generator=torch.Generator().manual_seed(0), dtype=torch.float32
    )
    hidden = hidden.to(model.dtype).to(model.device)
    try:
        setattr(base, arch.layers, nn.ModuleList())
        _bypass(base, arch.after_layers)
        position_ids = torch.arange(3, device=hidden.device)[None]
        with torch.inference_mode():
            output = base(inputs_embeds=hidden, position_ids=position_ids, use_cache=False).last_hidden_state
    finally:
        setattr(base, arch.layers, layers)
        for name, module in after.items():
            setattr(base, name, module)
    if not torch.equal(output, hidden):
        raise UnsupportedModelError(
            f"{model.config.model_type} changes hidden states outside its layers, so it can only run as one stage"
        )


def stage_layers(model: PreTrainedModel, arch: Architecture, num_stages: int) -> list[range]:
    """Layers of every stage."""
    costs, head_cost = layer_costs(model, arch)
    return split_layers(costs, num_stages, head_cost)


def find_architecture(model: PreTrainedModel) -> Architecture:
    """Names of the model's parts, checked against the class that was built."""
    model_type = str(model.config.model_type)
    arch = architecture_of(model_type)
    try:
        base = model.get_submodule(arch.base)
    except AttributeError:
        raise UnsupportedModelError(f"unknown architecture {model_type!r}: it has no {arch.base!r}") from None
    for name in (arch.layers, arch.embedding, *filter(None, [arch.positions]), *arch.after_layers):
        if not hasattr(base, name):
            raise UnsupportedModelError(f"unknown architecture {model_type!r}: it has no {arch.base}.{name}")
    return arch


def head_name(model: PreTrainedModel) -> str:
    """Path of the vocabulary head inside the model."""
    head = _head(model)
    name: str = next(name for name, module in model.named_modules() if module is head)
    return name


def _head(model: PreTrainedModel) -> nn.Module:
    return cast(nn.Module, model.get_output_embeddings())  # type: ignore[no-untyped-call]  # transformers leaves it untyped


def _layers(model: PreTrainedModel, arch: Architecture) -> nn.ModuleList:
    return cast(nn.ModuleList, getattr(model.get_submodule(arch.base), arch.layers))


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _bypass(base: nn.Module, names: Sequence[str]) -> None:
    for name in names:
        if getattr(base, name, None) is not None:
            setattr(base, name, nn.Identity())


def _parent_of(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    parent, _, leaf = path.rpartition(".")
    return model.get_submodule(parent), leaf


def _stored_name(name: str, arch: Architecture, first_layer: int) -> str:
    """The name in the whole model: layers of a stage are numbered from 0, those of the checkpoint are not."""
    prefix = f"{arch.base}.{arch.layers}."
    if not name.startswith(prefix):
        return name
    index, _, rest = name.removeprefix(prefix).partition(".")
    return f"{prefix}{int(index) + first_layer}.{rest}"


def _spellings(name: str) -> list[str]:
    """Names under which checkpoints of the base model, of the causal model and of multimodal models store a tensor."""
    bare = next((name.removeprefix(prefix) for prefix in _NAME_PREFIXES if name.startswith(prefix)), name)
    return [name, bare, f"{_MULTIMODAL_PREFIX}{name}", f"model.{_MULTIMODAL_PREFIX}{bare}"]


def _check_shapes(model: PreTrainedModel, state: dict[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if state[name].shape != parameter.shape:
            raise UnsupportedModelError(
                f"tensor {name!r} is {tuple(state[name].shape)} in the checkpoint, the configuration says "
                f"{tuple(parameter.shape)}"
            )
