"""Tiny random models whose tokens are bytes, in a folder that stages and gateway both read."""

from collections.abc import Mapping
from pathlib import Path

import torch
from tests.gateway.models import END, PAD, VOCAB_SIZE, write_model
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

BLOCK_SIZE = 16
MAX_MODEL_LEN = 160
NUM_LAYERS = 3
NUM_HEADS = 4
HEAD_DIM = 16
KV_HEADS: Mapping[str, int] = {"llama": 2, "gpt2": NUM_HEADS}

#: How much more a printable character moves the logits: answers are mostly text, with broken bytes in between.
PRINTABLE_SCALE = 1.6


def whole_block_bytes(kind: str) -> int:
    """One block of float32 KV over all layers."""
    return NUM_LAYERS * 2 * KV_HEADS[kind] * HEAD_DIM * BLOCK_SIZE * 4


def make_model(kind: str, folder: Path) -> Path:
    write_model(folder)
    torch.manual_seed(5)
    model = _random(kind)
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]  # untyped there
    with torch.no_grad():
        head.weight[32:127] *= PRINTABLE_SCALE
    model.generation_config.eos_token_id = [END, PAD]
    model.save_pretrained(folder)
    return folder


def _random(kind: str) -> PreTrainedModel:
    if kind == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCAB_SIZE,
                n_embd=NUM_HEADS * HEAD_DIM,
                n_layer=NUM_LAYERS,
                n_head=NUM_HEADS,
                n_positions=MAX_MODEL_LEN,
                eos_token_id=END,
                bos_token_id=None,
                initializer_range=0.4,  # small weights repeat one token for ever, and such a test cannot fail
                tie_word_embeddings=False,
            )
        )
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=NUM_HEADS * HEAD_DIM,
            intermediate_size=112,
            num_hidden_layers=NUM_LAYERS,
            num_attention_heads=NUM_HEADS,
            num_key_value_heads=KV_HEADS[kind],
            max_position_embeddings=MAX_MODEL_LEN,
            eos_token_id=END,
            bos_token_id=None,
            initializer_range=0.4,
        )
    )
