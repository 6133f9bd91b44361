"""Folders that are made once: whole or not there at all, whoever asks at the same time and however it ends."""

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from fastserve_worker.models.errors import PrepareError

log = logging.getLogger(__name__)

#: Part of every key. Raised when what is made of the same source changes.
LAYOUT_VERSION = 1

_KEY_DIGITS = 16
_SAMPLE_BYTES = 1024 * 1024


def default_cache_dir() -> Path:
    """$XDG_CACHE_HOME/fastserve/models, usually ~/.cache/fastserve/models."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastserve" / "models"


def folder_name(name: str, files: Iterable[Path]) -> str:
    """`name` and a hash of the files: names, sizes, beginnings and ends. Reading models whole would take minutes."""
    digest = hashlib.sha256(f"layout {LAYOUT_VERSION};".encode())
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size};".encode())
        with file.open("rb") as handle:
            digest.update(handle.read(_SAMPLE_BYTES))
            handle.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(handle.read(_SAMPLE_BYTES))
    return f"{name}-{digest.hexdigest()[:_KEY_DIGITS]}"


def build_once(cache_dir: Path, name: str, build: Callable[[Path], None]) -> Path:
    """The folder `name` of the cache; `build` fills an empty folder that takes this name when it is complete.

    Processes that ask at the same time wait for the first. What a killed one left behind is removed by the next.
    """
    target = cache_dir / name
    if target.is_dir():
        return target
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _locked(cache_dir / f".{name}.lock"):
            if not target.is_dir():
                _build(target, cache_dir / f".{name}.partial", build)
    except OSError as error:
        raise PrepareError(f"cannot write to the model cache {cache_dir}: {error.strerror or error}") from error
    return target


def _build(target: Path, partial: Path, build: Callable[[Path], None]) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        build(partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    partial.rename(target)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """The lock goes with the process that holds it; the file stays, since removing it would split the lock in two."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("another process prepares this model, waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
