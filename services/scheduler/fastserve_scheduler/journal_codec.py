"""Events, commands and configurations as nested lists of plain values, for the journal."""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import cast

from fastserve_scheduler.core import events
from fastserve_scheduler.core.commands import Command, PlanItem, RunIteration
from fastserve_scheduler.core.config import CoreConfig, MlfqConfig
from fastserve_scheduler.core.events import ConfigChanged, Event, ProfileUpdated
from fastserve_scheduler.core.profile import Profile
from fastserve_scheduler.profiler import profile_from_json, profile_to_json


class UnknownEventError(ValueError):
    """An event of another version."""


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
        return encode_config(value)
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
    """Raises UnknownEventError for an event this version does not know."""
    name, *values = encoded
    kind = _EVENTS.get(str(name))
    if kind is None:
        raise UnknownEventError(f"unknown event {name!r}")
    if kind is ProfileUpdated:
        return ProfileUpdated(profile_from_json(cast(dict[str, list[list[int]]], values[0])))
    if kind is ConfigChanged:
        return ConfigChanged(decode_config(cast(dict[str, object], values[0])))
    frozen = [tuple(value) if isinstance(value, list) else value for value in values]
    return cast(Event, cast(type, kind)(*frozen))


def encode_config(config: CoreConfig) -> dict[str, object]:
    values: dict[str, object] = {f.name: getattr(config, f.name) for f in fields(config)}
    values["mlfq"] = {f.name: getattr(config.mlfq, f.name) for f in fields(config.mlfq)}
    return values


def decode_config(stored: dict[str, object]) -> CoreConfig:
    values = dict(stored)
    values["mlfq"] = MlfqConfig(**cast(dict[str, int], values["mlfq"]))  # type: ignore[arg-type]  # checked at birth
    classes = cast(list[tuple[str, int]], values["service_classes"])
    values["service_classes"] = tuple((name, alpha_ns) for name, alpha_ns in classes)
    return CoreConfig(**values)  # type: ignore[arg-type]  # checked at birth
