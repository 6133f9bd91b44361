"""What a model folder has and what it lacks."""

import json
from enum import StrEnum
from pathlib import Path

from fastserve_worker.models.errors import PrepareError

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")


class Part(StrEnum):
    """What every prepared folder has, beside config.json."""

    WEIGHTS = "safetensors weights"
    TOKENIZER = "tokenizer.json"
    TOKENIZER_CONFIG = "tokenizer_config.json"
    GENERATION_CONFIG = "generation_config.json"


def missing_parts(folder: Path) -> set[Part]:
    """Raises PrepareError for a folder that is no model, or that names weight files it does not have."""
    if not (folder / CONFIG).is_file():
        raise PrepareError(f"{folder} is not a model folder: it has no {CONFIG}")
    missing = {
        part
        for part, name in (
            (Part.TOKENIZER, TOKENIZER),
            (Part.TOKENIZER_CONFIG, TOKENIZER_CONFIG),
            (Part.GENERATION_CONFIG, GENERATION_CONFIG),
        )
        if not (folder / name).is_file()
    }
    if not weight_files(folder, SAFETENSORS):
        missing.add(Part.WEIGHTS)
        if not weight_files(folder, PICKLED):
            raise PrepareError(f"{folder} has no weights: neither {SAFETENSORS[0]} nor {PICKLED[0]}, sharded or not")
    return missing


def weight_files(folder: Path, names: tuple[str, str]) -> list[Path]:
    """Files of one kind of weights, the single one or those of the index; empty when there is neither."""
    single, index = (folder / name for name in names)
    if index.is_file():
        shards = [folder / name for name in sorted(set(read_json(index)["weight_map"].values()))]
        lost = [shard.name for shard in shards if not shard.is_file()]
        if lost:
            raise PrepareError(f"{folder} is incomplete: {index.name} names {lost[0]}, which is not there")
        return shards
    return [single] if single.is_file() else []


def read_json(path: Path) -> dict[str, dict[str, str]]:
    try:
        content: dict[str, dict[str, str]] = json.loads(path.read_text())
    except ValueError as error:
        raise PrepareError(f"{path} is not valid JSON: {error}") from error
    return content
