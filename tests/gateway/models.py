"""Tiny model folders: words without weights."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from fastserve_gateway.text.pieces import _byte_alphabet

#: Ids 0 .. 255 are the bytes themselves, so a test writes an answer as `list(text.encode())`.
MERGED_HE, MERGED_LL = 256, 257
END, PAD, TOOL = 258, 259, 260
#: Two more than the tokenizer knows: a padded embedding.
VOCAB_SIZE = 263

TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'tool' -%}{{ raise_exception('no tools here') }}{%- endif -%}"
    "<{{ message.role }}>{{ message.content }}{{ eos_token }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<assistant>{%- if quiet -%}shh{%- endif -%}{%- endif -%}"
)


def byte_tokenizer() -> Tokenizer:
    vocab = {char: byte for char, byte in _byte_alphabet().items()}
    vocab |= {"he": MERGED_HE, "ll": MERGED_LL}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("h", "e"), ("l", "l")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<|pad|>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool call>", special=False)])
    return tokenizer


def write_model(folder: Path, *, chat: bool = True, tokenizer: Tokenizer | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (tokenizer or byte_tokenizer()).save(str(folder / "tokenizer.json"))
    config: dict[str, object] = {"eos_token": {"content": "<|end|>"}, "bos_token": None}
    if chat:
        config["chat_template"] = TEMPLATE
    files: dict[str, object] = {
        "config.json": {"vocab_size": VOCAB_SIZE, "eos_token_id": END},
        "generation_config.json": {"eos_token_id": [END, PAD]},
        "tokenizer_config.json": config,
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def ids_of(text: str) -> list[int]:
    return list(text.encode())
