"""Names of the parts of a decoder inside its transformers class, per model type."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Architecture:
    """Attribute names. Parts that belong to the first or the last stage only are passed through on the others."""

    #: Path of the base model inside the ForCausalLM class.
    base: str
    layers: str
    embedding: str
    #: Learned position embedding added to the token embedding, if any.
    positions: str | None = None
    #: Further modules between the embedding and the first layer.
    before_layers: tuple[str, ...] = ()
    #: Modules between the last layer and the head.
    after_layers: tuple[str, ...] = ()
    #: Name of the head's weight in checkpoints that call it otherwise than the class does.
    stored_head: str | None = None


#: Llama's names, shared by most: mistral, qwen2, qwen3, gemma, olmo, granite, ...
DEFAULT = Architecture(base="model", layers="layers", embedding="embed_tokens", after_layers=("norm",))

_GPT2 = Architecture(base="transformer", layers="h", embedding="wte", positions="wpe", after_layers=("ln_f",))

ARCHITECTURES = {
    "opt": Architecture(
        base="model.decoder",
        layers="layers",
        embedding="embed_tokens",
        positions="embed_positions",
        before_layers=("project_in",),
        after_layers=("final_layer_norm", "project_out"),
    ),
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gpt_neox": Architecture(
        base="gpt_neox",
        layers="layers",
        embedding="embed_in",
        after_layers=("final_layer_norm",),
        stored_head="embed_out.weight",
    ),
    "phi": Architecture(base="model", layers="layers", embedding="embed_tokens", after_layers=("final_layernorm",)),
}


def architecture_of(model_type: str) -> Architecture:
    """Names for `model_type`; whether the class really has them is checked where it is built."""
    return ARCHITECTURES.get(model_type, DEFAULT)
