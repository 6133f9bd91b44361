"""Settings: frozen, validated at birth, the same from flags, environment and a TOML file.

A settings class is a pydantic model; its fields are the one list that flags (`--max-num-seqs`), variables
(`FASTSERVE_MAX_NUM_SEQS`) and TOML keys (`max-num-seqs`) are made from. Flags win over variables, variables over
the file, the file over defaults. A wrong value is refused with a sentence that names the setting.
"""

import argparse
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, ClassVar, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from fastserve_common.logs import LogFormat, LogLevel
from fastserve_common.units import format_bytes, parse_bytes

ENV_PREFIX = "FASTSERVE_"


class SettingsError(ValueError):
    """A sentence for the person who set it."""


class Settings(BaseModel):
    """Base of every service's settings."""

    # Values of `Field(repr=False)` are secrets: no error, log or repr shows them.
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, hide_input_in_errors=True)

    #: Fields that have no flag of this command.
    hidden: ClassVar[frozenset[str]] = frozenset()
    #: Fields by the heading that `--help` shows them under, in this order. Those of no group come first, and names that
    #: are no fields of this class are passed over.
    groups: ClassVar[Mapping[str, Sequence[str]]] = {}

    log_level: LogLevel = Field("info", description="how much to log")
    log_format: LogFormat = Field("human", description="log lines for people or for machines")

    @classmethod
    def load(cls, argv: Sequence[str], *, prog: str, positional: str | None = None) -> Self:
        """Parse `argv`; `--help` prints and exits 0. Raises SettingsError.

        `positional`: the field that is given as a bare argument.
        """
        parser = cls.parser(prog, positional)
        return cls.from_args(parser.parse_args(argv))

    @classmethod
    def parser(cls, prog: str, positional: str | None = None) -> argparse.ArgumentParser:
        # Where there are so many that they are grouped, a list of all of them is no summary.
        usage = f"{prog} [OPTION ...]{f' [{positional.upper()}]' if positional else ''}" if cls.groups else None
        parser = _Parser(prog=prog, usage=usage, description=(cls.__doc__ or "").strip(), allow_abbrev=False)
        cls.add_arguments(parser, positional)
        return parser

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser, positional: str | None = None) -> None:
        parser.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help="TOML file with these settings")
        shown = [name for name in cls.model_fields if name not in cls.hidden]
        grouped = {name for names in cls.groups.values() for name in names}
        for name in shown:
            if name not in grouped:
                _add_argument(parser.add_argument, name, cls.model_fields[name], name == positional)
        for title, names in cls.groups.items():
            group = parser.add_argument_group(title)
            for name in names:
                if name in shown:
                    _add_argument(group.add_argument, name, cls.model_fields[name], name == positional)

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Self:
        """Merge parsed flags with environment and file. Attributes that are not settings are ignored."""
        given = {k: v for k, v in vars(args).items() if k in cls.model_fields}
        config = getattr(args, "config", None) or os.environ.get(f"{ENV_PREFIX}CONFIG")
        values: dict[str, Any] = {}
        values.update(_from_file(cls, Path(config)) if config else {})
        values.update(_from_environment(cls))
        values.update(given)
        try:
            return cls(**values)
        except ValidationError as error:
            raise SettingsError(_sentence(error, cls._secrets())) from error

    def changed(self, **values: object) -> Self:
        """The same with other values, checked as at birth. Raises SettingsError."""
        try:
            return type(self)(**{**self.model_dump(), **values})
        except ValidationError as error:
            raise SettingsError(_sentence(error, self._secrets())) from error

    @classmethod
    def _secrets(cls) -> frozenset[str]:
        return frozenset(name for name, field in cls.model_fields.items() if not field.repr)

    def to_args(self) -> list[str]:
        """The flags that say the same; defaults are left out. For starting a child process."""
        flags: list[str] = []
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if value == field.get_default(call_default_factory=True, validated_data={}):
                continue
            flag = _flag(name)
            if isinstance(value, bool):
                flags.append(flag if value else f"--no-{flag[2:]}")
            elif isinstance(value, (list, tuple)):
                flags += [f"{flag}={item}" for item in value]
            elif value is not None:
                flags.append(f"{flag}={value}")  # one word: a value may begin with a dash
        return flags


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:  # noqa: ANN401 - never returns
        raise SettingsError(message)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _add_argument(add: Callable[..., object], name: str, field: FieldInfo, positional: bool) -> None:
    text = _help_text(field).replace("%", "%%")
    if positional:
        add(name, nargs="?", default=argparse.SUPPRESS, help=text)
    elif field.annotation is bool:
        add(_flag(name), action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
    elif _is_list(field):
        add(_flag(name), action="append", default=argparse.SUPPRESS, metavar="VALUE", help=text)
    else:
        add(_flag(name), default=argparse.SUPPRESS, metavar=name.rpartition("_")[2].upper(), help=text)


def _help_text(field: FieldInfo) -> str:
    text = field.description or ""
    if field.is_required() or field.default_factory is not None or field.default in (None, "", ()):
        return text
    is_size = any(getattr(item, "func", None) is parse_bytes for item in field.metadata)
    return f"{text} (default: {format_bytes(field.default) if is_size else field.default})"


def _is_list(field: FieldInfo) -> bool:
    return getattr(field.annotation, "__origin__", None) in (tuple, list)


def _from_environment(cls: type[Settings]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, field in cls.model_fields.items():
        raw = os.environ.get(f"{ENV_PREFIX}{name.upper()}")
        if raw is not None:
            found[name] = [part for part in raw.split(",") if part] if _is_list(field) else raw
    return found


def _from_file(cls: type[Settings], path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise SettingsError(f"--config: cannot read {path}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"--config: {path} is not valid TOML: {error}") from error
    values = {key.replace("-", "_"): value for key, value in table.items()}
    unknown = sorted(set(values) - set(cls.model_fields))
    if unknown:
        raise SettingsError(f"--config: {path} sets {unknown[0].replace('_', '-')}, which is not a setting")
    return values


def _sentence(error: ValidationError, secrets: Set[str]) -> str:
    parts = []
    for item in error.errors(include_url=False):
        name = str(item["loc"][0]) if item["loc"] else ""
        message = item["msg"].removeprefix("Value error, ")
        message = message[:1].lower() + message[1:]
        hidden = name in secrets or item["type"] == "missing" or isinstance(item["input"], dict)
        got = "" if hidden else f" (got {item['input']!r})"
        parts.append(f"{_flag(name)}: {message}{got}" if name else message)
    return "; ".join(parts)


def literal_values(annotation: object) -> tuple[str, ...]:
    """The words of a Literal, for messages and completion."""
    return tuple(str(v) for v in get_args(annotation))
