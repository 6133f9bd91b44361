"""Cluster state: who is there (leases), who leads, counters. Redis in a cluster, an SQLite file on one machine.

Nothing in flight depends on it: when it is gone, running streams go on, and everyone writes their own facts again
when it returns.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from urllib.parse import urlparse

from fastserve_common.settings import SettingsError
from fastserve_common.state.redis_store import RedisState
from fastserve_common.state.sqlite import SqliteState
from fastserve_common.state.store import LEASE_TTL_S, Occupied, StateError, StateStore

__all__ = [
    "DEFAULT_GROUP",
    "GROUP_PATTERN",
    "LEASE_TTL_S",
    "Occupied",
    "RedisState",
    "SqliteState",
    "StateError",
    "StateStore",
    "group_of",
    "in_group",
    "membership",
    "open_state",
    "rank_member",
    "stage_member",
    "without_password",
]

log = logging.getLogger(__name__)

#: A scheduler with its standbys and stages is a group; several may serve one model. Who is not told belongs to this.
DEFAULT_GROUP = "default"
#: What a group may be called.
GROUP_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
_OF = "@"


def in_group(name: str, group: str) -> str:
    """What something that every group has is called in the store; the default group's keeps its plain name."""
    return name if group == DEFAULT_GROUP else f"{name}{_OF}{group}"


def group_of(name: str) -> str:
    """Which group a name belongs to."""
    return name.partition(_OF)[2] or DEFAULT_GROUP


def stage_member(replica: int, stage: int, group: str = DEFAULT_GROUP) -> str:
    """The name under which a stage registers in role `stage`: that of the first replica has no number."""
    return in_group(f"stage-{stage}" if replica == 0 else f"stage-{replica}-{stage}", group)


def rank_member(replica: int, stage: int, rank: int, group: str = DEFAULT_GROUP) -> str:
    """The name under which a rank of a stage registers: rank 0 as the stage itself, the others in role `rank`."""
    name = stage_member(replica, stage)
    return in_group(name if rank == 0 else f"{name}-rank-{rank}", group)


def open_state(url: str) -> StateStore:
    """`sqlite:///path/to/file`, `redis://[user:password@]host:port/db`, `rediss://...` (TLS) or `unix://path`.

    The query of a Redis URL names options of its client: `rediss://host:6380/0?ssl_ca_certs=/etc/ca.pem`. Raises
    SettingsError for anything else, StateError when the file cannot be opened.
    """
    scheme = urlparse(url).scheme
    if scheme == "sqlite":
        return SqliteState(Path(url.removeprefix("sqlite://")))
    if scheme in ("redis", "rediss", "unix"):
        return RedisState(url)
    raise SettingsError(f"--state: expected sqlite:///path or redis://host:port (got {without_password(url)!r})")


def without_password(url: str) -> str:
    """The URL as it may be shown."""
    password = urlparse(url).password
    return url.replace(f":{password}@", ":***@") if password else url


@contextlib.asynccontextmanager
async def membership(
    store: StateStore, role: str, member: str, info: Mapping[str, str], ttl_s: float = LEASE_TTL_S
) -> AsyncIterator[None]:
    """Registered for as long as the block runs; a store that is away is retried until it is back."""

    async def renew() -> None:
        while True:
            try:
                await store.register(role, member, info, ttl_s)
            except StateError as error:
                log.warning("cannot renew membership, will retry: %s", error)
            await asyncio.sleep(ttl_s / 3)

    await store.register(role, member, info, ttl_s)
    task = asyncio.create_task(renew())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        with contextlib.suppress(StateError):
            await store.unregister(role, member, info)
