"""A folder of safetensors files, read tensor by tensor: a stage touches only the tensors it asks for."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import safe_open

from fastserve_worker.engine.errors import UnsupportedModelError
from fastserve_worker.engine.tensor_parallel import Shard

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
CONFIG_NAME = "config.json"


class Checkpoint:
    """Tensor names of a model folder and the file each one is in. Nothing is read until `load`."""

    def __init__(self, model_dir: Path) -> None:
        """Raises UnsupportedModelError when the folder has no configuration or no safetensors weights."""
        if not (model_dir / CONFIG_NAME).is_file():
            raise UnsupportedModelError(f"{model_dir.name!r} is not a model folder: it has no {CONFIG_NAME}")
        self._model_dir = model_dir
        self._file_of = _find_tensors(model_dir)
        #: Names of the tensors read so far.
        self.tensors_read: set[str] = set()

    def fingerprint(self) -> str:
        """sha256 over the configuration and the names and sizes of the weight files."""
        digest = hashlib.sha256((self._model_dir / CONFIG_NAME).read_bytes())
        for file in sorted(set(self._file_of.values())):
            digest.update(f"{file.name}:{file.stat().st_size};".encode())
        return digest.hexdigest()

    def find(self, candidates: Iterable[str]) -> str | None:
        """The first of the names that the checkpoint has."""
        return next((name for name in candidates if name in self._file_of), None)

    def load(
        self,
        wanted: Mapping[str, str],
        dtype: torch.dtype,
        device: torch.device,
        shards: Mapping[str, Shard] = MappingProxyType({}),
    ) -> dict[str, torch.Tensor]:
        """Read tensors: `wanted` maps the name to return to the name in the checkpoint. One tensor is read once.

        `shards`: pieces to read instead of whole tensors, by the name to return; such a tensor has one name only.
        """
        by_file: dict[Path, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for name, stored in wanted.items():
            by_file[self._file_of[stored]][stored].append(name)
        loaded: dict[str, torch.Tensor] = {}
        for file, tensors in by_file.items():
            with safe_open(file, framework="pt", device=str(device)) as handle:
                for stored, names in tensors.items():
                    shard = shards.get(names[0])
                    whole = handle.get_tensor(stored) if shard is None else shard.read(handle.get_slice(stored))
                    tensor = whole.to(dtype)
                    self.tensors_read.add(stored)
                    loaded.update(dict.fromkeys(names, tensor))
        return loaded


def _find_tensors(model_dir: Path) -> dict[str, Path]:
    index, single = model_dir / INDEX_NAME, model_dir / SINGLE_NAME
    if index.is_file():
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return {name: model_dir / file for name, file in weight_map.items()}
    if single.is_file():
        with safe_open(single, framework="pt") as handle:
            return dict.fromkeys(handle.keys(), single)
    raise UnsupportedModelError(
        f"{model_dir.name!r} has no safetensors weights ({SINGLE_NAME} or {INDEX_NAME}); other formats are not read"
    )
