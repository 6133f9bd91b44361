"""Folders that are made once: whole or not there at all, whoever asks at the same time and however it ends."""

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import uuid
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

    Processes that ask at the same time wait for the first. Where they cannot see each other's lock, because the cache
    was emptied between them, each builds apart and the first to finish counts. What a killed one left behind is
    removed by the next.
    """
    target = cache_dir / name
    if target.is_dir():
        return target
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _locked(cache_dir / f".{name}.lock"):
            if not target.is_dir():
                _remove_abandoned(cache_dir, name)
                _build(target, cache_dir / f".{name}.partial-{uuid.uuid4().hex}", build)
    except OSError as error:
        raise PrepareError(f"cannot write to the model cache {cache_dir}: {error.strerror or error}") from error
    return target


def _build(target: Path, partial: Path, build: Callable[[Path], None]) -> None:
    partial.mkdir(parents=True)
    try:
        with _held(partial):
            build(partial)
            partial.rename(target)
    except OSError:
        if not target.is_dir():  # else somebody else was faster
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _remove_abandoned(cache_dir: Path, name: str) -> None:
    for partial in cache_dir.glob(f".{name}.partial*"):
        with contextlib.suppress(OSError), _held(partial):  # raises when its builder lives
            shutil.rmtree(partial)


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """A sign of life that the kernel takes down with the process. Raises BlockingIOError when another one holds it."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


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
