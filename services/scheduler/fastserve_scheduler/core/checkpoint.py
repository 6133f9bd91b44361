"""The whole state of a core as plain data, and a core made from it: it goes on exactly as the first one would have.

A core is a graph of objects that point to each other. `encode` walks it from the core and writes every object down
once, with every attribute that it has, so that state added to the core is carried without a word here; what the walk
does not know it refuses. `decode` makes objects of the classes that a core of this version consists of, and of no
others, and runs none of their constructors.

    {"classes": {name: [attribute, ...]}, "objects": [[class or container, value, ...], ...]}

The first object is the core. A value is a number, a string, a boolean, null, a list (a tuple), or {"@": n}, the nth
object. Strings are names: no text of a request is in a core.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from itertools import chain
from operator import attrgetter
from types import BuiltinMethodType, MethodType
from typing import cast

from fastserve_scheduler.core.blocks import BlockTable
from fastserve_scheduler.core.commands import PlanItem, RunIteration, SwapOp
from fastserve_scheduler.core.config import CoreConfig
from fastserve_scheduler.core.flight import Flight
from fastserve_scheduler.core.history import Happening
from fastserve_scheduler.core.host import HostCopy
from fastserve_scheduler.core.job import Job
from fastserve_scheduler.core.kv_state import KvState
from fastserve_scheduler.core.profile import Profile
from fastserve_scheduler.core.ranked import BY_DEADLINE, BY_RANK, RankedJobs
from fastserve_scheduler.core.scheduler import SchedulerCore
from fastserve_scheduler.core.swaps import Swap

_PLAIN = frozenset({int, str, bool, type(None)})
_TUPLES = frozenset({tuple})
_CONTAINERS: dict[str, type] = {cls.__name__: cls for cls in (list, dict, OrderedDict, Counter, deque)}
_WITH_JOBS = (Job, BlockTable, HostCopy, KvState, Happening, Flight, RunIteration, PlanItem, SwapOp, Swap, RankedJobs)
"""Classes that a core without jobs may have no object of; all others of its classes it has."""
_KEYS: dict[str, object] = {"rank": BY_RANK, "deadline": BY_DEADLINE}
"""Functions that parts of the core hold, and methods of the core itself that they do."""
_METHODS = ("_flying", "record")
_KEY, _METHOD = "key", "method"
_COMPILED = "__mypyc_attrs__"
"""What mypyc gives its classes: names of attributes. It makes no object without running the constructor."""


Layout = dict[str, tuple[type, tuple[str, ...]]]
"""Classes by name, each with its attributes in the order of its rows."""


class CheckpointError(Exception):
    """State that cannot be written down (a defect), or data that is no state of this version's core."""


def encode(core: SchedulerCore) -> dict[str, object]:
    """Plain data, ready for JSON. Takes time in proportion to jobs, blocks and history: see docs/simulator.md."""
    walk = _walked(core)
    return {"classes": {name: names for name, (_, names) in walk.layout().items()}, "objects": walk.rows}


def decode(stored: object, config: CoreConfig, profile: Profile) -> SchedulerCore:
    """The core that was encoded; `config` and `profile`: those it had. Raises CheckpointError."""
    if hasattr(SchedulerCore, _COMPILED):
        raise CheckpointError("a core compiled to C is not made from a state: use the Python one")
    known = _layout(SchedulerCore(config, profile))
    try:
        checkpoint = cast(dict[str, object], stored)
        layout = _agreed(cast(dict[str, list[str]], checkpoint["classes"]), known)
        core = _Builder(cast(list[list[object]], checkpoint["objects"]), layout).build()
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"the state is damaged: {type(error).__name__}: {error}") from error
    if type(core) is not SchedulerCore:
        raise CheckpointError("the state is damaged: it is not that of a core")
    return core


# ---- writing


class _Walk:
    """Objects in the order they are met. `attributes`: of each class, in the order of its rows."""

    def __init__(self) -> None:
        self.attributes: dict[type, tuple[str, ...]] = {}
        self.rows: list[list[object]] = []
        self._getters: dict[type, Callable[[object], tuple[object, ...]]] = {}
        self._met: list[object] = []
        self._references: dict[int, dict[str, int]] = {}

    def refer(self, met: object) -> dict[str, int]:
        reference = self._references.get(id(met))
        if reference is None:
            reference = self._references[id(met)] = {"@": len(self._met)}
            self._met.append(met)
        return reference

    def finish(self) -> None:
        for met in self._met:  # grows meanwhile
            self.rows.append(self._row(met))

    def layout(self) -> Layout:
        layout = {cls.__name__: (cls, names) for cls, names in self.attributes.items()}
        if len(layout) < len(self.attributes):
            raise CheckpointError(f"two classes of the core have one name: {sorted(layout)}")
        return layout

    def _values(self, values: tuple[object, ...] | list[object]) -> list[object]:
        if _PLAIN.issuperset(map(type, values)):
            return list(values)
        return [value if type(value) in _PLAIN else self._value(value) for value in values]

    def _value(self, value: object) -> object:
        return self._values(value) if type(value) is tuple else self.refer(value)

    def _row(self, met: object) -> list[object]:
        kind = type(met)
        if kind in self._getters:
            return [kind.__name__, *self._values(self._getters[kind](met))]
        if isinstance(met, Enum):
            self.attributes[kind] = ()
            return [kind.__name__, met.value]
        if isinstance(met, tuple):
            self.attributes[kind] = _fields(kind)
            return [kind.__name__, *self._values(met)]
        if _CONTAINERS.get(kind.__name__) is kind:
            return self._container(met)
        if kind in (MethodType, BuiltinMethodType):
            return self._method(met)
        for name, key in _KEYS.items():
            if met is key:
                return [_KEY, name]
        return self._object(met)

    def _container(self, met: object) -> list[object]:
        name = type(met).__name__
        if isinstance(met, dict):
            return [name, *self._values([part for item in met.items() for part in item])]
        if isinstance(met, deque):
            return [name, met.maxlen, *self._records(list(met))]
        return [name, *self._records(cast(list[object], met))]

    def _records(self, values: list[object]) -> list[object]:
        """As `_values`; tuples of plain values stay as they are: the history is a long list of them."""
        if frozenset(map(type, values)) == _TUPLES:
            parts = chain.from_iterable(cast(list[tuple[object, ...]], values))
            if _PLAIN.issuperset(map(type, parts)):
                return values
        return self._values(values)

    def _method(self, met: object) -> list[object]:
        owner, name = getattr(met, "__self__"), getattr(met, "__name__")  # noqa: B009 - of two types, both have them
        if name not in _METHODS or owner is not self._met[0]:
            raise CheckpointError(f"the core holds the method {name} of {type(owner).__name__}")
        return [_METHOD, self.refer(owner), name]

    def _object(self, met: object) -> list[object]:
        kind, names = type(met), _names(met)
        if not kind.__module__.startswith(__name__.rpartition(".")[0]) or not names:
            raise CheckpointError(f"the core holds a {kind.__name__}, which no checkpoint can carry")
        if self.attributes.setdefault(kind, names) != names:
            raise CheckpointError(f"two {kind.__name__} of a core have different attributes")
        if is_dataclass(kind):  # all of one layout: the next ones are read in one go
            self._getters[kind] = _getter(names)
        return [kind.__name__, *self._values(_getter(names)(met))]


def _walked(core: SchedulerCore) -> _Walk:
    walk = _Walk()
    walk.refer(core)
    try:
        walk.finish()
    except AttributeError as error:
        raise CheckpointError(f"the core is not whole: {error}") from error
    return walk


def _names(met: object) -> tuple[str, ...]:
    """Every attribute of an object: of a dataclass with slots, of a class that mypyc compiled, or of any other."""
    kind = type(met)
    if is_dataclass(kind) and not hasattr(met, "__dict__"):
        return _fields(kind)
    compiled: tuple[str, ...] | None = getattr(kind, _COMPILED, None)
    if compiled is not None and not getattr(met, "__dict__", None):
        return tuple(sorted(name for name in compiled if name != "__dict__"))
    if not hasattr(met, "__dict__") or any(vars(cls).get("__slots__") for cls in kind.__mro__):
        raise CheckpointError(f"the core holds a {kind.__name__}, whose attributes nobody knows")
    return tuple(sorted(vars(met)))


def _fields(kind: type) -> tuple[str, ...]:
    """Of a dataclass or a named tuple; none of an enum."""
    if is_dataclass(kind):
        return tuple(field.name for field in fields(kind))
    named: tuple[str, ...] = getattr(kind, "_fields", ())
    return named


def _getter(names: tuple[str, ...]) -> Callable[[object], tuple[object, ...]]:
    if len(names) == 1:
        return lambda met: (getattr(met, names[0]),)
    return attrgetter(*names)


# ---- reading


def _layout(fresh: SchedulerCore) -> Layout:
    """The classes that a core of this version consists of, by name, with their attributes."""
    return {cls.__name__: (cls, _fields(cls)) for cls in _WITH_JOBS} | _walked(fresh).layout()


def _agreed(stored: dict[str, list[str]], known: Layout) -> Layout:
    """This version's classes with the attributes they are stored with, of which there must be neither more nor less."""
    for name, names in stored.items():
        if name not in known:
            raise CheckpointError(f"the state is one of another version: this one has no {name}")
        differing = sorted(frozenset(names) ^ frozenset(known[name][1]))
        if differing:
            raise CheckpointError(f"the state is one of another version: {name} differs in {', '.join(differing)}")
    return {name: (known[name][0], tuple(names)) for name, names in stored.items()}


class _Builder:
    """Two passes, because objects point to each other: first all of them empty, then what is in them."""

    def __init__(self, rows: list[list[object]], layout: Layout) -> None:
        self._rows, self._layout = rows, layout
        self._made: list[object] = []

    def build(self) -> object:
        for row in self._rows:
            self._made.append(self._shell(row))
        for row, made in zip(self._rows, self._made, strict=True):
            self._fill(row, made)
        return self._made[0]

    def _shell(self, row: list[object]) -> object:
        kind = str(row[0])
        if kind == "deque":
            return deque[object](maxlen=cast(int | None, row[1]))
        if kind in _CONTAINERS:
            return _CONTAINERS[kind]()
        if kind == _KEY:
            return _KEYS[str(row[1])]
        if kind == _METHOD:
            return getattr(self._made[0], _METHODS[_METHODS.index(str(row[2]))])
        cls, names = self._layout[kind]
        if issubclass(cls, Enum):
            return cls(row[1])
        if issubclass(cls, tuple):
            return cast(Callable[..., object], cls)(**dict(zip(names, self._values(row[1:]), strict=True)))
        return cls.__new__(cls)

    def _fill(self, row: list[object], made: object) -> None:
        if isinstance(made, dict):
            values = self._values(row[1:])
            for key, value in zip(values[::2], values[1::2], strict=True):  # `update` of a Counter adds
                made[key] = value
        elif isinstance(made, list):
            made.extend(self._values(row[1:]))
        elif isinstance(made, deque):
            made.extend(self._values(row[2:]))
        elif row[0] not in (_KEY, _METHOD) and not isinstance(made, Enum | tuple):
            for name, value in zip(self._layout[str(row[0])][1], self._values(row[1:]), strict=True):
                object.__setattr__(made, name, value)

    def _values(self, stored: list[object]) -> list[object]:
        return [value if type(value) in _PLAIN else self._value(value) for value in stored]

    def _value(self, stored: object) -> object:
        if type(stored) is list:
            return tuple(self._values(stored))
        return self._made[cast(dict[str, int], stored)["@"]]
