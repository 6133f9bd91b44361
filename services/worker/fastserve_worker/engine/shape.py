"""The numbers of a model that other parts need: pool sizing, admission limits, layout fingerprints."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Shape of the whole model and of one stage's cut of it. Heads are those of one rank.

    `first_layer` and `last_layer` are both inclusive, counted in the whole model.
    """

    model_type: str
    num_layers: int
    first_layer: int
    last_layer: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    dtype: torch.dtype
    #: sha256 over the configuration and the names and sizes of the weight files: equal on all stages of one pipeline.
    fingerprint: str

    @property
    def num_stage_layers(self) -> int:
        """Layers of this stage."""
        return self.last_layer - self.first_layer + 1

    def kv_block_bytes(self, block_size: int) -> int:
        """Bytes of one block of `block_size` tokens over all layers of this stage, K and V."""
        elements = self.num_stage_layers * 2 * self.num_kv_heads * block_size * self.head_dim
        return elements * self.dtype.itemsize
