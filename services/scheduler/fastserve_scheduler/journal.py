"""The journal: every event with its time and the core's answer, as JSON lines, so that an incident replays.

File layout: a header line (schema, CoreConfig, Profile), then `[now_ns, event, commands]` per line. A file that is
full is followed by FILE.1, FILE.2, ...; when there are too many the newest one ends and journalling with it: the
beginning is what a replay needs. The journals of earlier starts are FILE.old1 (the latest), FILE.old2, ...
"""

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import IO, cast

from fastserve_scheduler.core import events
from fastserve_scheduler.core.commands import Command, PlanItem, RunIteration
from fastserve_scheduler.core.config import CoreConfig, MlfqConfig
from fastserve_scheduler.core.events import ConfigChanged, Event, ProfileUpdated
from fastserve_scheduler.core.profile import Profile
from fastserve_scheduler.core.scheduler import SchedulerCore
from fastserve_scheduler.profiler import profile_from_json, profile_to_json

log = logging.getLogger(__name__)

SCHEMA = 1
MAX_SEGMENT_BYTES = 64 * 1024 * 1024
MAX_SEGMENTS = 16

KEPT_JOURNALS = 3
"""Of earlier starts: the restart after an incident must not take its journal away."""

_EVENTS: dict[str, type[Event]] = {
    cls.__name__: cls
    for cls in (
        events.JobArrived,
        events.JobAborted,
        events.IterationDone,
        events.StageUp,
        events.StageDown,
        events.ProfileUpdated,
        events.ConfigChanged,
        events.Woke,
        events.HostSlotsGranted,
        events.HostStoreDown,
        events.SwapDone,
    )
}


class JournalError(Exception):
    """Not a journal, or one that cannot be replayed; a sentence says why."""


# --- encoding


def encode_commands(commands: Sequence[Command]) -> list[object]:
    """Commands as nested lists: class name, then the fields in order; `swaps` of a plan only where there are any."""
    return [_encode_command(command) for command in commands]


def _encode_command(command: Command) -> list[object]:
    encoded = cast(list[object], _encode(command))
    if isinstance(command, RunIteration) and not command.swaps:
        del encoded[-1]
    return encoded


def _encode(value: object) -> object:
    if isinstance(value, Profile):
        return profile_to_json(value)
    if isinstance(value, CoreConfig):
        return _encode_config(value)
    if isinstance(value, PlanItem):
        return [PlanItem.__name__, *map(_encode, value)]
    if is_dataclass(value):
        return [type(value).__name__, *(_encode(getattr(value, f.name)) for f in fields(value))]
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    return value


def encode_event(event: Event) -> list[object]:
    return cast(list[object], _encode(event))


def decode_event(encoded: Sequence[object]) -> Event:
    """Raises JournalError for an event this version does not know."""
    name, *values = encoded
    kind = _EVENTS.get(str(name))
    if kind is None:
        raise JournalError(f"unknown event {name!r}")
    if kind is ProfileUpdated:
        return ProfileUpdated(profile_from_json(cast(dict[str, list[list[int]]], values[0])))
    if kind is ConfigChanged:
        return ConfigChanged(_decode_config(cast(dict[str, object], values[0])))
    frozen = [tuple(value) if isinstance(value, list) else value for value in values]
    return cast(Event, cast(type, kind)(*frozen))


def _encode_config(config: CoreConfig) -> dict[str, object]:
    values: dict[str, object] = {f.name: getattr(config, f.name) for f in fields(config)}
    values["mlfq"] = {f.name: getattr(config.mlfq, f.name) for f in fields(config.mlfq)}
    return values


def _decode_config(stored: dict[str, object]) -> CoreConfig:
    values = dict(stored)
    values["mlfq"] = MlfqConfig(**cast(dict[str, int], values["mlfq"]))  # type: ignore[arg-type]  # checked at birth
    classes = cast(list[tuple[str, int]], values["service_classes"])
    values["service_classes"] = tuple((name, alpha_ns) for name, alpha_ns in classes)
    return CoreConfig(**values)  # type: ignore[arg-type]  # checked at birth


# --- writing


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
        self._path, self._max_segment_bytes, self._max_segments = path, max_segment_bytes, max_segments
        self._header = {"journal": SCHEMA, "config": _encode_config(config), "profile": profile_to_json(profile)}
        self._segment = 0
        self._written = 0
        self._file: IO[str] | None = None
        _make_way(path, keep)
        self._open()

    def _open(self) -> None:
        path = _segment_path(self._path, self._segment)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w")
        self._written = 0
        self._write(_line({**self._header, "segment": self._segment}))

    def record(self, now_ns: int, event: Event, commands: Sequence[Command]) -> None:
        if self._file is None:
            return
        try:
            self._write(_line([now_ns, encode_event(event), encode_commands(commands)]))
            if self._written >= self._max_segment_bytes:
                self._next_segment()
        except OSError as error:
            log.error("cannot write the journal, it ends here: %s", error)
            self._file = None

    def _write(self, line: str) -> None:
        if self._file is not None:
            self._file.write(line)
            self._written += len(line)

    def _next_segment(self) -> None:
        self.close()
        self._segment += 1
        if self._segment == self._max_segments:
            log.warning("the journal is full, it ends here", extra={"segments": self._segment})
            return
        self._open()

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _line(value: object) -> str:
    return json.dumps(value, separators=(",", ":")) + "\n"


def _segment_path(path: Path, segment: int) -> Path:
    return path if segment == 0 else path.with_name(f"{path.name}.{segment}")


def _kept_path(path: Path, age: int) -> Path:
    return path if age == 0 else path.with_name(f"{path.name}.old{age}")


def _make_way(path: Path, keep: int) -> None:
    """Every earlier journal becomes one older; those beyond `keep` are gone."""
    oldest = keep
    while _kept_path(path, oldest).exists():
        oldest += 1
    for age in range(oldest - 1, -1, -1):
        for segment, file in enumerate(_segments(_kept_path(path, age))):
            if age >= keep:
                file.unlink()
            else:
                file.replace(_segment_path(_kept_path(path, age + 1), segment))


def _segments(path: Path) -> list[Path]:
    """Existing files of the journal, in order."""
    found: list[Path] = []
    while (candidate := _segment_path(path, len(found))).exists():
        found.append(candidate)
    return found


# --- reading


@dataclass(frozen=True, slots=True)
class Entry:
    """`commands` as encoded: what the core answered when it was recorded."""

    now_ns: int
    event: Event
    commands: list[object]


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first entry that a replay answers differently."""

    number: int
    entry: Entry
    replayed: list[object]


@dataclass(frozen=True, slots=True)
class ReplayResult:
    num_events: int
    core: SchedulerCore
    divergence: Divergence | None


def read_header(path: Path) -> tuple[CoreConfig, Profile]:
    """Raises JournalError."""
    try:
        with path.open() as file:
            header = json.loads(file.readline())
        if header["journal"] != SCHEMA:
            raise JournalError(f"{path.name} has journal schema {header['journal']}, this version reads {SCHEMA}")
        return _decode_config(header["config"]), profile_from_json(header["profile"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise JournalError(f"{path.name} is not a journal: {error}") from error


def read_entries(path: Path) -> Iterator[Entry]:
    """All segments in order. A last line cut short by a crash is left out. Raises JournalError."""
    for segment in _segments(path):
        with segment.open() as file:
            file.readline()
            for line in file:
                if not line.endswith("\n"):
                    return
                now_ns, event, commands = json.loads(line)
                yield Entry(now_ns, decode_event(event), commands)


def replay(path: Path, *, check: bool = False) -> ReplayResult:
    """Feed the journal to a fresh core and compare its commands byte for byte; stops at the first difference."""
    config, profile = read_header(path)
    core = SchedulerCore(config, profile)
    number = 0
    for entry in read_entries(path):
        number += 1
        replayed = encode_commands(core.handle(entry.event, entry.now_ns))
        if check:
            core.check()
        if _line(replayed) != _line(entry.commands):
            return ReplayResult(number, core, Divergence(number, entry, replayed))
    return ReplayResult(number, core, None)
