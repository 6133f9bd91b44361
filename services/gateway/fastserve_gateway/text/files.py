"""What the gateway reads from a model folder. Nothing here imports a deep-learning library."""

import json
from dataclasses import dataclass
from pathlib import Path


class ModelFilesError(ValueError):
    """The folder does not hold a model this gateway can serve; a sentence that names the file."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """One model folder, read once at start."""

    tokenizer_json: str
    #: The `decoder` object of tokenizer.json: how tokens become text.
    decoder: dict[str, object]
    #: Prompts are not rewritten (lower-cased, stripped, ...) before they are split into tokens.
    keeps_text: bool
    #: Ids the model accepts are below this. It may exceed the tokenizer's own vocabulary (padded embeddings).
    vocab_size: int | None
    eos_token_ids: frozenset[int]
    chat_template: str | None
    #: `bos_token`, `eos_token`, ... as chat templates see them.
    special_tokens: dict[str, str]


def read_model_files(folder: Path) -> ModelFiles:
    """Raises ModelFilesError when a file is missing or is not what it should be."""
    try:
        tokenizer_json = (folder / "tokenizer.json").read_text(encoding="utf-8")
    except OSError as error:
        raise ModelFilesError(f"{folder}: no readable tokenizer.json ({error.strerror})") from error
    tokenizer = _as_object(tokenizer_json, folder / "tokenizer.json")
    config = _read(folder / "config.json")
    generation = _read(folder / "generation_config.json")
    tokenizer_config = _read(folder / "tokenizer_config.json")
    decoder = tokenizer.get("decoder")
    return ModelFiles(
        tokenizer_json=tokenizer_json,
        decoder=decoder if isinstance(decoder, dict) else {},
        keeps_text=tokenizer.get("normalizer") is None,
        vocab_size=_vocab_size(config),
        eos_token_ids=_ids(generation.get("eos_token_id")) | _ids(_text_value(config, "eos_token_id")),
        chat_template=_chat_template(folder, tokenizer_config),
        special_tokens=_special_tokens(tokenizer_config, _read(folder / "special_tokens_map.json")),
    )


def _as_object(text: str, path: Path) -> dict[str, object]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ModelFilesError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFilesError(f"{path} does not hold a JSON object")
    return value


def _read(path: Path) -> dict[str, object]:
    """An absent file is an empty object."""
    if not path.exists():
        return {}
    try:
        return _as_object(path.read_text(encoding="utf-8"), path)
    except OSError as error:
        raise ModelFilesError(f"{path} cannot be read ({error.strerror})") from error


def _text_value(config: dict[str, object], key: str) -> object:
    """Multimodal configs keep the language model's values one level down."""
    nested = config.get("text_config")
    if key not in config and isinstance(nested, dict):
        return nested.get(key)
    return config.get(key)


def _vocab_size(config: dict[str, object]) -> int | None:
    size = _text_value(config, "vocab_size")
    return size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else None


def _ids(value: object) -> frozenset[int]:
    items = value if isinstance(value, list) else [value]
    return frozenset(item for item in items if isinstance(item, int) and not isinstance(item, bool) and item >= 0)


def _chat_template(folder: Path, tokenizer_config: dict[str, object]) -> str | None:
    """A file of its own wins over tokenizer_config.json, which may name several: `default` is the one we use."""
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    entry = tokenizer_config.get("chat_template")
    if isinstance(entry, list):
        named = {item.get("name"): item.get("template") for item in entry if isinstance(item, dict)}
        entry = named.get("default")
    return entry if isinstance(entry, str) else None


_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def _special_tokens(*sources: dict[str, object]) -> dict[str, str]:
    """Earlier sources win. A token is a string or an object with `content`."""
    found: dict[str, str] = {}
    for source in sources:
        for name in _SPECIAL_TOKENS:
            value = source.get(name)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                found.setdefault(name, value)
    return found
