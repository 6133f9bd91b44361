"""Models as data: the shapes their configuration files give."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense decoder. `gated`: three matrices in the MLP instead of two. `tied`: one matrix for tokens in and out."""

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    mlp_hidden: int
    vocab: int
    gated: bool
    tied: bool
    max_len: int

    @property
    def layer_weights(self) -> int:
        attention = self.hidden * self.head_size * (2 * self.num_heads + 2 * self.num_kv_heads)
        return attention + self.hidden * self.mlp_hidden * (3 if self.gated else 2)

    @property
    def num_parameters(self) -> int:
        """Norms, biases and positions left out: below half a percent."""
        return self.num_layers * self.layer_weights + self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def kv_elements_per_token(self) -> int:
        """K and V of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_size


def _opt(name: str, num_layers: int, hidden: int, num_heads: int) -> ModelShape:
    """Zhang et al., "OPT: Open Pre-trained Transformer Language Models", 2022, table 1."""
    return ModelShape(
        name,
        num_layers,
        hidden,
        num_heads,
        num_heads,
        hidden // num_heads,
        4 * hidden,
        vocab=50_272,
        gated=False,
        tied=True,
        max_len=2048,
    )


MODELS: dict[str, ModelShape] = {
    model.name: model
    for model in (
        _opt("opt-2.7b", 32, 2560, 32),
        _opt("opt-13b", 40, 5120, 40),
        _opt("opt-66b", 64, 9216, 72),
        _opt("opt-175b", 96, 12288, 96),
        ModelShape("llama-2-7b", 32, 4096, 32, 32, 128, 11_008, 32_000, True, False, 4096),
        ModelShape("llama-3-8b", 32, 4096, 32, 8, 128, 14_336, 128_256, True, False, 8192),
        ModelShape("llama-3-70b", 80, 8192, 64, 8, 128, 28_672, 128_256, True, False, 8192),
        ModelShape("qwen3-8b", 36, 4096, 32, 8, 128, 12_288, 151_936, True, False, 40_960),
        ModelShape("smollm2-135m", 30, 576, 9, 3, 64, 1_536, 49_152, True, True, 8192),
    )
}
