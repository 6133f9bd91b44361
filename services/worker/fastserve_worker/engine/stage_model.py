"""One pipeline stage of a decoder: token ids or hidden states in, hidden states or logits out."""

from pathlib import Path
from typing import cast

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from fastserve_worker.engine import stage_builder, tensor_parallel
from fastserve_worker.engine.architectures import Architecture
from fastserve_worker.engine.batch import PagedBatch
from fastserve_worker.engine.checkpoint import Checkpoint
from fastserve_worker.engine.linear import resolve_kind
from fastserve_worker.engine.optimise import optimise
from fastserve_worker.engine.shape import ModelShape
from fastserve_worker.engine.tensor_parallel import Ranks


class StageModel:
    """Layers of one stage, ready to run. Not thread-safe: one thread runs a stage."""

    def __init__(self, model: PreTrainedModel, arch: Architecture, config: ModelShape, *, is_last: bool) -> None:
        self.config = config
        self.is_first = config.first_layer == 0
        self.is_last = is_last
        self._model = model
        self._base = model.get_submodule(arch.base)

    @classmethod
    def load(
        cls,
        model_dir: Path,
        *,
        stage: int,
        num_stages: int,
        dtype: torch.dtype,
        device: torch.device,
        linear: str = "auto",
        ranks: Ranks | None = None,
    ) -> "StageModel":
        """Load stage `stage` (from 0) of `num_stages` from a folder of config.json and safetensors weights.

        `ranks`: this rank among those that share the stage; None: it is alone. Reads only this stage's tensors, and of
        those that are divided only this rank's piece.

        Raises UnsupportedModelError for what cannot be served, ValueError for a
        stage outside the pipeline or an unknown `linear`.
        """
        if not 0 <= stage < num_stages:
            raise ValueError(f"stage {stage} is not one of {num_stages}")
        linear_kind = resolve_kind(linear, dtype, device)
        checkpoint = Checkpoint(model_dir)
        config = stage_builder.read_config(model_dir)
        if ranks:
            tensor_parallel.check(config, ranks.size)
        model = stage_builder.build_skeleton(config, dtype)
        arch = stage_builder.find_architecture(model)
        layers = stage_builder.stage_layers(model, arch, num_stages)[stage]
        draws = ranks is None or ranks.rank == 0
        stage_builder.cut(model, arch, layers, draws=draws)
        base = model.get_submodule(arch.base)
        shards = tensor_parallel.divide(base, config, ranks) if ranks else {}
        stage_builder.load_weights(model, arch, layers, checkpoint, device, shards)
        if ranks:
            tensor_parallel.add_up_sums(base, config, ranks)
        if stage > 0:
            stage_builder.check_passes_hidden_states_through(model, arch)
        shape = _shape(config, layers, dtype, checkpoint.fingerprint(), ranks.size if ranks else 1)
        optimise(model, arch, shape, linear_kind)
        stage_builder.leave_files(model)
        return cls(model, arch, shape, is_last=draws and stage == num_stages - 1)

    @torch.inference_mode()
    def forward(self, inputs: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        """Run one iteration, storing K and V of its tokens in the batch's pool.

        `inputs`: int64 [tokens] ids on the first stage, [tokens, hidden_size] in the model's dtype on later ones.
        Returns [tokens, hidden_size], or on the last stage, where tokens are drawn, float32 logits
        [num_sampled, vocab_size].
        """
        if inputs.shape[0] != batch.num_tokens:
            raise ValueError(f"the batch has {batch.num_tokens} tokens, the inputs {inputs.shape[0]}")
        name = "input_ids" if self.is_first else "inputs_embeds"
        arguments = {name: inputs[None], "position_ids": batch.positions[None], "use_cache": False, "paged": batch}
        if not self.is_last or batch.num_sampled == 0:
            hidden = cast(torch.Tensor, self._base(**arguments).last_hidden_state[0])
            return hidden if not self.is_last else hidden.new_empty((0, self.config.vocab_size), dtype=torch.float32)
        logits = self._model(**arguments, logits_to_keep=batch.sample_rows).logits
        return cast(torch.Tensor, logits[0].float())


def _shape(config: PreTrainedConfig, layers: range, dtype: torch.dtype, fingerprint: str, num_ranks: int) -> ModelShape:
    heads = int(config.num_attention_heads)
    kv_heads = 1 if getattr(config, "multi_query", False) else getattr(config, "num_key_value_heads", None)
    return ModelShape(
        model_type=str(config.model_type),
        num_layers=int(config.num_hidden_layers),
        first_layer=layers.start,
        last_layer=layers.stop - 1,
        hidden_size=int(config.hidden_size),
        num_heads=heads // num_ranks,
        num_kv_heads=int(kv_heads or heads) // num_ranks,
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        vocab_size=int(config.vocab_size),
        max_position_embeddings=int(config.max_position_embeddings),
        dtype=dtype,
        fingerprint=fingerprint,
    )
