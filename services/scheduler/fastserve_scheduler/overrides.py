"""What operators have changed of the settings, kept in the state store: the next leader goes on with it.

A change holds at once, saved or not: when it is needed most, the store may be what is away. The leader looks once a
second whether the store has what it should, so a change that could not be saved, or was wiped, is saved when the store
is back. A leader that could not read the changes of the one before it takes them over as soon as it can; what it was
told meanwhile counts over them.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field

from fastserve_common.settings import SettingsError
from fastserve_common.state import LEASE_TTL_S, StateError, StateStore
from fastserve_scheduler.settings import SchedulerSettings

log = logging.getLogger(__name__)

NOTE = "scheduling-overrides"
#: The longest that a takeover, or an operator, waits for the store.
STORE_TIMEOUT_S = 2.0
LOOK_S = LEASE_TTL_S / 3

#: Names of settings.
CHANGEABLE = (
    "policy",
    "alpha_ms",
    "promotion",
    "quantum_ratio",
    "num_queues",
    "eta",
    "demote_when",
    "max_num_seqs",
    "max_num_batched_tokens",
    "prefill_chunk_tokens",
    "max_num_queued_reqs",
    "max_num_queued_tokens",
)

#: By name of the setting.
Entries = Mapping[str, "Override"]


@dataclass(frozen=True, slots=True)
class Override:
    """A value, who gave it and why, and when in seconds since 1970."""

    value: str | int | float
    peer: str
    reason: str
    changed_s: int


@dataclass(slots=True)
class Overrides:
    """`entries` count over `configured`, what this process was started with. Used by one event loop."""

    store: StateStore
    generation: int
    configured: SchedulerSettings
    #: Under which name they are kept.
    note: str = NOTE
    #: Seconds since 1970.
    clock_s: Callable[[], float] = time.time
    entries: Entries = field(default_factory=dict)
    #: What the store holds, as far as is known.
    _stored: str | None = None
    _loaded: bool = False
    _problem: str = "not tried yet"
    _saving: asyncio.Lock = field(default_factory=asyncio.Lock)

    # --- what holds

    @property
    def settings(self) -> SchedulerSettings:
        return self.settings_of(self.entries)

    def settings_of(self, entries: Entries) -> SchedulerSettings:
        """Raises SettingsError."""
        return self.configured.changed(**{name: entry.value for name, entry in entries.items()})

    def with_changes(self, changes: Mapping[str, str | int | float], peer: str, reason: str) -> Entries:
        now_s = int(self.clock_s())
        new = {name: Override(value, peer, reason, now_s) for name, value in changes.items()}
        return {**self.entries, **new}

    def without(self, names: Iterable[str]) -> Entries:
        dropped = frozenset(names)
        return {name: entry for name, entry in self.entries.items() if name not in dropped}

    # --- the store

    @property
    def not_saved(self) -> str:
        """Why another leader would not know of `entries`; empty when it would."""
        return "" if self._stored == self._text() else self._problem

    async def load(self) -> bool:
        """What the leader before was told. False: the store does not answer; `keep` asks it again."""
        try:
            async with asyncio.timeout(STORE_TIMEOUT_S):
                self._found(await self.store.saved(self.note))
        except (StateError, TimeoutError) as error:
            self._problem = _no_answer(error)
            log.warning("cannot read what operators have changed, will retry: %s", self._problem)
            return False
        return True

    async def save(self) -> None:
        """`not_saved` says how it went."""
        async with self._saving:
            text = self._text()
            if not self._loaded or text == self._stored:
                return  # before it has been read, it would be lost
            try:
                async with asyncio.timeout(STORE_TIMEOUT_S):
                    saved = await self.store.save(self.note, text, self.generation)
            except (StateError, TimeoutError) as error:
                self._problem = _no_answer(error)
                log.warning("cannot save what operators have changed, will retry: %s", self._problem)
                return
            if saved:
                self._stored = text
            else:
                self._problem = "another scheduler leads"

    async def keep(self, apply: Callable[[Entries], None]) -> None:
        """Until cancelled. `apply` is called with what was found late; it may raise SettingsError."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look(apply)

    async def look(self, apply: Callable[[Entries], None]) -> None:
        """Once: does the store have what it should?"""
        if not self._loaded:
            told = self.entries
            if await self.load() and self.entries != told:
                _apply(apply, self.entries)
        else:
            try:
                self._stored = await self.store.saved(self.note) or ""
            except StateError as error:
                self._problem = _no_answer(error)
        await self.save()

    def _found(self, text: str | None) -> None:
        self._loaded, self._stored = True, text or ""
        known = {name: entry for name, entry in _entries_of(self._stored).items() if name in CHANGEABLE}
        self.entries = self._usable({**known, **self.entries})

    def _usable(self, entries: Entries) -> Entries:
        """Those that this version, started as it was, can have: a scheduler that refused to start could not be told."""
        try:
            self.settings_of(entries)
            return entries
        except SettingsError:
            usable: dict[str, Override] = {}
            for name, entry in entries.items():
                try:
                    self.settings_of({**usable, name: entry})
                    usable[name] = entry
                except SettingsError as error:
                    log.error("what an operator has changed does not fit any more, and is dropped: %s", error)
            return usable

    def _text(self) -> str:
        """Nothing changed is nothing to keep."""
        if not self.entries:
            return ""
        return json.dumps({name: asdict(entry) for name, entry in sorted(self.entries.items())})


def _apply(apply: Callable[[Entries], None], entries: Entries) -> None:
    try:
        apply(entries)
    except SettingsError as error:
        log.error("what an operator has changed cannot be served by these stages: %s", error)


def _entries_of(text: str) -> Entries:
    """None of them when the text is none of ours."""
    if not text:
        return {}
    try:
        return {name: Override(**entry) for name, entry in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError) as error:
        log.error("cannot understand what operators have changed, it is dropped: %s", error, extra={"saved": text})
        return {}


def _no_answer(error: Exception) -> str:
    return f"the state store does not answer: {error or 'not in time'}"
