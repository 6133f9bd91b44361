"""Adds what a model folder lacks, in a folder of the cache that links to the rest: users' folders stay as they are."""

import json
from pathlib import Path

from fastserve_worker.models import folder as parts
from fastserve_worker.models.cache import build_once, folder_name
from fastserve_worker.models.errors import PrepareError
from fastserve_worker.models.folder import Part, missing_parts, weight_files

#: Keys of a model's configuration that say how its answers begin and end.
_GENERATION_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


def complete_folder(folder: Path, cache_dir: Path) -> Path:
    """`folder` itself when nothing is missing. Raises PrepareError when something cannot be made."""
    missing = missing_parts(folder)
    if not missing:
        return folder
    sources = [path for path in sorted(folder.iterdir()) if path.is_file()]
    name = folder_name(folder.name, sources)
    return build_once(cache_dir, name, lambda out: _complete(folder, sources, missing, out))


def _complete(folder: Path, sources: list[Path], missing: set[Part], out: Path) -> None:
    if Part.WEIGHTS in missing:
        from fastserve_worker.models.convert import convert_weights

        convert_weights(folder, out)
    if Part.TOKENIZER in missing:
        from fastserve_worker.models.convert import convert_tokenizer

        convert_tokenizer(folder, out)
        if not (out / parts.TOKENIZER).is_file():
            raise PrepareError(f"{folder} has no tokenizer that can be written as {parts.TOKENIZER}")
    pickled = {path.name for path in weight_files(folder, parts.PICKLED)} | set(parts.PICKLED)
    for path in sources:
        if path.name not in pickled and not (out / path.name).exists():
            (out / path.name).symlink_to(path.resolve())
    fill_in(out)


def fill_in(out: Path) -> None:
    """Small files that a folder with weights and tokenizer may still lack."""
    if not (out / parts.TOKENIZER_CONFIG).exists():
        (out / parts.TOKENIZER_CONFIG).write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}\n')
    if not (out / parts.GENERATION_CONFIG).exists():
        config = parts.read_json(out / parts.CONFIG)
        kept = {key: config[key] for key in _GENERATION_KEYS if config.get(key) is not None}
        (out / parts.GENERATION_CONFIG).write_text(json.dumps(kept, indent=2) + "\n")
