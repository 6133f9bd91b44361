"""What a state store offers, whichever it is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fastserve_common.buckets import Draw, Drawn

#: A member that has not renewed for this long is gone.
LEASE_TTL_S = 3.0


class StateError(Exception):
    """The store cannot be reached or answered with an error."""


@dataclass(frozen=True, slots=True)
class Occupied:
    """`taken`: places of the owner that all holders have now, after the call."""

    granted: bool
    taken: int


class StateStore(Protocol):
    """All calls raise StateError when the store cannot be reached."""

    async def register(self, role: str, member: str, info: Mapping[str, str], ttl_s: float = LEASE_TTL_S) -> None:
        """Put or renew a member; it vanishes `ttl_s` after the last call."""

    async def unregister(self, role: str, member: str, info: Mapping[str, str] | None = None) -> None:
        """Remove a member; with `info`, only while it is what was registered last: another may have the name now."""

    async def members(self, role: str) -> dict[str, dict[str, str]]:
        """Live members by name, names rising."""

    async def increment(self, counter: str, least: int = 1) -> int:
        """The next value: one more than the last, and no less than `least`. 1, 2, 3, ... over the life of the store.

        A store that was wiped has forgotten the last value: whoever must not go back passes what it knows of it.
        """

    async def acquire(self, name: str, owner: str, ttl_s: float = LEASE_TTL_S) -> bool:
        """Take or renew a leadership lease. False when someone else holds it."""

    async def release(self, name: str, owner: str) -> None: ...

    async def draw(self, owner: str, draws: Sequence[Draw]) -> Drawn:
        """Take of the buckets of `owner`, all or nothing, by the store's clock. Full when nobody drew for a minute."""

    async def occupy(self, owner: str, holder: str, held: int, more: int, limit: int, ttl_s: float) -> Occupied:
        """`holder` says how many places of `owner` it holds, and asks for `more`: all of them or none.

        Granted when all holders together have no more than `limit` then. What a holder said last counts, and is
        forgotten `ttl_s` later: who holds anything must say so again before. `more` 0 is always granted.
        """

    async def save(self, name: str, value: str, version: int) -> bool:
        """Keep `value` until another one is saved. False, and nothing changes, if there is one of a higher version."""

    async def saved(self, name: str) -> str | None:
        """What was saved last; None when nothing was, or the store was wiped since."""

    async def close(self) -> None: ...
