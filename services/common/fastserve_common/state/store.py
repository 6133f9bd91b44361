"""What a state store offers, whichever it is."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from fastserve_common.buckets import Draw, Drawn

#: A member that has not renewed for this long is gone.
LEASE_TTL_S = 3.0


class StateError(Exception):
    """The store cannot be reached or answered with an error."""


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

    async def close(self) -> None: ...
