"""Tiny random models with plain transformers' greedy continuations."""

from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB_SIZE = 307
NUM_NEW_TOKENS = 14
PROMPT_LENGTHS = (5, 19, 33, 8)
_COMMON: dict[str, object] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_LLAMA = {**_COMMON, "intermediate_size": 112, "num_key_value_heads": 2}
_GPT2: dict[str, object] = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_GEMMA = {**_LLAMA, "head_dim": 16, "sliding_window": 11, "query_pre_attn_scalar": 16}

#: One model per feature that can go wrong: model type and what differs from the common tiny shape.
MODEL_CONFIGS: dict[str, tuple[str, dict[str, object]]] = {
    "opt": ("opt", {**_COMMON, "ffn_dim": 112, "word_embed_proj_dim": 64}),
    "opt-projections": (
        "opt",
        {**_COMMON, "ffn_dim": 112, "word_embed_proj_dim": 32, "do_layer_norm_before": False},
    ),
    "gpt2": ("gpt2", _GPT2),
    "gpt-bigcode-mqa": ("gpt_bigcode", _GPT2),
    "gpt-neox": ("gpt_neox", {**_COMMON, "intermediate_size": 112}),
    "llama-gqa": ("llama", _LLAMA),
    "llama-mqa-tied": ("llama", {**_LLAMA, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", _LLAMA),
    "qwen3": ("qwen3", {**_LLAMA, "head_dim": 24}),
    "mistral-window": ("mistral", {**_LLAMA, "sliding_window": 11}),
    "gemma2-softcap": ("gemma2", {**_GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("gemma3_text", {**_GEMMA, "num_key_value_heads": 1}),
}


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A saved model, prompts, and what transformers' own `generate` makes of them."""

    name: str
    folder: Path
    prompts: list[list[int]]
    expected: list[list[int]]


def _spread(model: torch.nn.Module, layer_scale: float) -> None:
    """Random initial weights repeat one token for ever, and such a test cannot fail: make the answers varied."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(0.03 * noise)
            elif "embed" in name or "wte" in name or "wpe" in name or "lm_head" in name:
                parameter.copy_(0.05 * noise)
            else:
                parameter.copy_(layer_scale * noise * parameter.shape[-1] ** -0.5)


def make_model(name: str, folder: Path) -> TinyModel:
    model_type, settings = MODEL_CONFIGS[name]
    config = AutoConfig.for_model(model_type, **settings)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()  # type: ignore[no-untyped-call]  # untyped there
    _spread(model, layer_scale=8.0 if name == "opt-projections" else 3.0)
    model.save_pretrained(folder, max_shard_size="200KB")
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]
    return TinyModel(name, folder, prompts, [greedy_by_transformers(model, prompt) for prompt in prompts])


def greedy_by_transformers(model: transformers.PreTrainedModel, prompt: list[int]) -> list[int]:
    """The oracle: one prompt alone, dense cache, no padding."""
    ids = torch.tensor([prompt])
    generation = transformers.GenerationConfig(  # type: ignore[no-untyped-call]  # as above
        max_new_tokens=NUM_NEW_TOKENS, min_new_tokens=NUM_NEW_TOKENS, do_sample=False, pad_token_id=0
    )
    output = model.generate(  # type: ignore[operator]  # its mixin is typed as a module attribute
        ids, attention_mask=torch.ones_like(ids), generation_config=generation
    )
    return list(output[0, len(prompt) :].tolist())
