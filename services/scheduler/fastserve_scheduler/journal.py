"""The journal: every event with its time and the core's answer, as JSON lines, so that an incident replays.

FILE is followed by FILE.1, FILE.2, ... as each is full; when there are too many the oldest is removed, because it is
the end of a run that somebody asks about. Each file replays by itself:

    {"journal": 2, "segment": n, "version": ..., "config": CoreConfig, "profile": Profile}
    the state of the core (`core/checkpoint.py`), from the second file on: the first begins with a new core
    [now_ns, event, commands]
    ...

The journals of earlier starts are FILE.old1 (the latest), FILE.old2, ..., each with its own .N.
"""

import contextlib
import gc
import importlib.metadata
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from fastserve_scheduler.core.checkpoint import CheckpointError, encode
from fastserve_scheduler.core.commands import Command
from fastserve_scheduler.core.config import CoreConfig
from fastserve_scheduler.core.events import Event
from fastserve_scheduler.core.profile import Profile
from fastserve_scheduler.core.scheduler import SchedulerCore
from fastserve_scheduler.journal_codec import encode_commands, encode_config, encode_event
from fastserve_scheduler.profiler import profile_to_json

log = logging.getLogger(__name__)

SCHEMA = 2
MAX_SEGMENT_BYTES = 64 * 1024 * 1024
MAX_SEGMENTS = 16
LEAST_SEGMENTS = 2
"""One that is whole, and the one that is written."""

KEPT_JOURNALS = 3
"""Of earlier starts: the restart after an incident must not take its journal away."""


class JournalWriter:
    """Buffered; `close` flushes. An error while writing ends the journal, never the service."""

    def __init__(
        self,
        path: Path,
        config: CoreConfig,
        profile: Profile,
        max_segment_bytes: int = MAX_SEGMENT_BYTES,
        max_segments: int = MAX_SEGMENTS,
        keep: int = KEPT_JOURNALS,
    ) -> None:
        """For a core that is new. Raises OSError when the file cannot be made."""
        self._path, self._max_segment_bytes, self._max_segments = path, max_segment_bytes, max_segments
        self._segment = 0
        self._written = 0
        self._full = max_segment_bytes
        path.parent.mkdir(parents=True, exist_ok=True)
        _make_way(path, keep)
        self._file: IO[str] | None = self._begun(_header(0, config, profile))

    def record(self, now_ns: int, event: Event, commands: Sequence[Command]) -> None:
        if self._file is None:
            return
        with self._ends_by_errors():
            self._write(_line([now_ns, encode_event(event), encode_commands(commands)]))

    def turn(self, core: SchedulerCore) -> None:
        """Begin the next file when this one is full. `core`: as the last event left it; its whole state is written
        down, so call this when nobody waits. A journal that is never turned is one file of any length."""
        if self._file is None or self._written < self._full:
            return
        with self._ends_by_errors():
            with _no_collection():
                state = _line(encode(core))
            self._file.close()
            self._segment += 1
            self._file = self._begun(_header(self._segment, core.config, core.predictor.profile) + state)
            for _, old in segments(self._path)[: -self._max_segments]:
                old.unlink()

    def flush(self) -> None:
        if self._file is not None:
            with self._ends_by_errors():
                self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            with self._ends_by_errors():
                self._file.close()
            self._file = None

    def _begun(self, head: str) -> IO[str]:
        """The file of this segment, whole as far as `head` goes: what it is to replace may be removed now."""
        file = _segment_path(self._path, self._segment).open("w")
        file.write(head)
        file.flush()
        self._written = len(head)
        # No sooner than its events take as much as its state: that must be worth writing down.
        self._full = max(self._max_segment_bytes, 2 * len(head))
        return file

    def _write(self, line: str) -> None:
        if self._file is not None:
            self._file.write(line)
            self._written += len(line)

    @contextmanager
    def _ends_by_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, CheckpointError) as error:
            log.error("cannot write the journal, it ends here: %s", error)
            file, self._file = self._file, None
            if file is not None:
                with contextlib.suppress(OSError):  # of what is still in its buffer; it is closed nevertheless
                    file.close()


def _header(segment: int, config: CoreConfig, profile: Profile) -> str:
    version = importlib.metadata.version("fastserve")
    header = {"journal": SCHEMA, "segment": segment, "version": version}
    return _line({**header, "config": encode_config(config), "profile": profile_to_json(profile)})


def _line(value: object) -> str:
    return json.dumps(value, separators=(",", ":")) + "\n"


@contextmanager
def _no_collection() -> Iterator[None]:
    """A state is very many small objects that live for a moment; to look through them for garbage doubles the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


# --- names


def segments(path: Path) -> list[tuple[int, Path]]:
    """Existing files of the journal with the numbers in their names, in order."""
    found = [(0, path)] if path.exists() else []
    prefix = f"{path.name}."
    for candidate in path.parent.iterdir():
        number = candidate.name.removeprefix(prefix)
        if candidate.name.startswith(prefix) and number.isdecimal():
            found.append((int(number), candidate))
    return sorted(found)


def _segment_path(path: Path, segment: int) -> Path:
    return path if segment == 0 else path.with_name(f"{path.name}.{segment}")


def _kept_path(path: Path, age: int) -> Path:
    return path if age == 0 else path.with_name(f"{path.name}.old{age}")


def _make_way(path: Path, keep: int) -> None:
    """Every earlier journal becomes one older; those beyond `keep` are gone."""
    oldest = keep
    while segments(_kept_path(path, oldest)):
        oldest += 1
    for age in range(oldest - 1, -1, -1):
        for number, file in segments(_kept_path(path, age)):
            if age >= keep:
                file.unlink()
            else:
                file.replace(_segment_path(_kept_path(path, age + 1), number))
