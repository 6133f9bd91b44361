"""A journal read again: its events, from the oldest file that is left, and a core that answers them anew."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from fastserve_scheduler.core.checkpoint import CheckpointError, decode
from fastserve_scheduler.core.config import CoreConfig
from fastserve_scheduler.core.events import Event
from fastserve_scheduler.core.profile import Profile
from fastserve_scheduler.core.scheduler import SchedulerCore
from fastserve_scheduler.journal import SCHEMA, segments
from fastserve_scheduler.journal_codec import UnknownEventError, decode_config, decode_event, encode_commands
from fastserve_scheduler.profiler import profile_from_json

WITHOUT_STATES = 1
"""The schema before: only a journal's first file begins with what a replay needs."""


class JournalError(Exception):
    """Not a journal, or one that cannot be replayed; a sentence says why."""


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
    """`since_ns`: time of the first event, where the journal's beginning is not there any more; else None."""

    num_events: int
    core: SchedulerCore
    divergence: Divergence | None
    since_ns: int | None = None


@dataclass(frozen=True, slots=True)
class _Segment:
    """One file with a whole head. `state`: its line, None for a journal's first file."""

    path: Path
    number: int
    version: str
    config: CoreConfig
    profile: Profile
    state: str | None


def read_header(path: Path) -> tuple[CoreConfig, Profile]:
    """Of the oldest file that is left. Raises JournalError."""
    first = _segments(path)[0]
    return first.config, first.profile


def read_entries(path: Path) -> Iterator[Entry]:
    """All that is left, in order. A last line cut short by a crash is left out. Raises JournalError."""
    return _entries(_segments(path))


def replay(path: Path, *, check: bool = False) -> ReplayResult:
    """Feed the journal to a core and compare its commands byte for byte; stops at the first difference.

    The core is a new one, or one with the state that the oldest file begins with. Raises JournalError.
    """
    found = _segments(path)
    core = _core(found[0])
    number, since_ns = 0, None
    for entry in _entries(found):
        number += 1
        if number == 1 and found[0].state is not None:
            since_ns = entry.now_ns
        replayed = encode_commands(core.handle(entry.event, entry.now_ns))
        if check:
            core.check()
        if json.dumps(replayed) != json.dumps(entry.commands):
            return ReplayResult(number, core, Divergence(number, entry, replayed), since_ns)
    return ReplayResult(number, core, None, since_ns)


def _core(first: _Segment) -> SchedulerCore:
    if first.state is None:
        if first.number > 0:
            raise JournalError(f"{first.path.name} begins with no state, and what was before it is missing")
        return SchedulerCore(first.config, first.profile)
    try:
        return decode(json.loads(first.state), first.config, first.profile)
    except (CheckpointError, ValueError) as error:
        raise JournalError(
            f"{first.path.name} begins with a state that this version cannot read: {error}"
            f" (it was written by fastserve {first.version})"
        ) from error


def _segments(path: Path) -> list[_Segment]:
    """At least one. A last file whose head a crash has cut short is left out: the one before it holds all there is."""
    files = [file for _, file in _named(path)] or [path]
    if len(files) > 1 and not _has_head(files[-1]):
        files.pop()
    found = [_segment(file) for file in files]
    for before, after in pairwise(found):
        if after.number != before.number + 1:
            raise JournalError(f"between {before.path.name} and {after.path.name} files are missing")
    return found


def _named(path: Path) -> list[tuple[int, Path]]:
    try:
        return segments(path)
    except OSError as error:
        raise JournalError(f"{path.name} is not a journal: {error}") from error


def _has_head(path: Path) -> bool:
    with _not_a_journal(path), path.open() as file:
        return file.readline().endswith("\n") and file.readline().endswith("\n")


def _segment(path: Path) -> _Segment:
    with _not_a_journal(path), path.open() as file:
        header: dict[str, Any] = json.loads(file.readline())
        schema, number = header["journal"], header.get("segment", 0)
        if schema not in (SCHEMA, WITHOUT_STATES):
            raise JournalError(f"{path.name} has journal schema {schema}, this version reads {SCHEMA}")
        state = file.readline() if schema == SCHEMA and number > 0 else None
        config, profile = decode_config(header["config"]), profile_from_json(header["profile"])
        return _Segment(path, number, header.get("version", "of an earlier version"), config, profile, state)


@contextmanager
def _not_a_journal(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise JournalError(f"{path.name} is not a journal: {error}") from error


def _entries(found: list[_Segment]) -> Iterator[Entry]:
    for segment in found:
        with segment.path.open() as file:
            file.readline()
            if segment.state is not None:
                file.readline()
            for line in file:
                if not line.endswith("\n"):
                    if segment is not found[-1]:
                        raise JournalError(f"{segment.path.name} is cut short, and {found[-1].path.name} goes on")
                    return
                yield _entry(line, segment)


def _entry(line: str, segment: _Segment) -> Entry:
    try:
        now_ns, event, commands = json.loads(line)
        return Entry(now_ns, decode_event(event), commands)
    except UnknownEventError as error:
        raise JournalError(f"{segment.path.name} has an {error}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise JournalError(f"{segment.path.name} has a line that is no event: {error}") from error
