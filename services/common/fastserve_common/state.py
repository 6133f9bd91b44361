"""Cluster state: who is there (leases), who leads, counters. Redis in a cluster, an SQLite file on one machine.

Nothing in flight depends on it: when it is gone, running streams go on, and everyone writes their own facts again
when it returns.
"""

import asyncio
import contextlib
import json
import logging
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, TypeVar
from urllib.parse import urlparse

import redis.asyncio
import redis.exceptions
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from fastserve_common.buckets import Draw, Drawn, draw
from fastserve_common.settings import SettingsError

log = logging.getLogger(__name__)

#: A member that has not renewed for this long is gone.
LEASE_TTL_S = 3.0

#: How long a process waits for another one's write to the SQLite file.
_BUSY_TIMEOUT_S = 5.0

#: A Redis that is silent for so long is away.
_REDIS_TIMEOUT_S = 2.0

T = TypeVar("T")


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


def stage_member(replica: int, stage: int) -> str:
    """The name under which a stage registers in role `stage`: that of the first replica has no number."""
    return f"stage-{stage}" if replica == 0 else f"stage-{replica}-{stage}"


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


_SCHEMA = """
CREATE TABLE IF NOT EXISTS members (role TEXT, member TEXT, info TEXT, expires_s REAL, PRIMARY KEY (role, member));
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER);
CREATE TABLE IF NOT EXISTS leases (name TEXT PRIMARY KEY, owner TEXT, expires_s REAL);
CREATE TABLE IF NOT EXISTS buckets (owner TEXT PRIMARY KEY, levels TEXT, at_s REAL);
"""


def _connect(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    deadline_s = time.monotonic() + _BUSY_TIMEOUT_S
    while True:  # the switch to WAL does not wait for the lock as everything else does
        try:
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=NORMAL")
            db.executescript(_SCHEMA)
            return db
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline_s:
                db.close()
                raise
            time.sleep(0.005)


class SqliteState:
    """One file, shared by the processes of one machine.

    One thread does all the work, in order: a call that was cancelled may still be running when the next one comes, and
    SQLite must not be closed, or used twice at once, under it.
    """

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = _connect(path)
        except (sqlite3.Error, OSError) as error:
            raise StateError(f"cannot open {path}: {error}") from error
        self._thread = ThreadPoolExecutor(1, "state")
        self._closed = False

    async def _call(self, work: Callable[[sqlite3.Connection], T]) -> T:
        if self._closed:
            raise StateError("the state store is closed")
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, self._db)
        except sqlite3.Error as error:
            raise StateError(str(error)) from error

    async def register(self, role: str, member: str, info: Mapping[str, str], ttl_s: float = LEASE_TTL_S) -> None:
        row = (role, member, json.dumps(dict(info)), time.time() + ttl_s)
        await self._call(lambda db: db.execute("INSERT OR REPLACE INTO members VALUES (?, ?, ?, ?)", row))

    async def unregister(self, role: str, member: str, info: Mapping[str, str] | None = None) -> None:
        query = "DELETE FROM members WHERE role = ?1 AND member = ?2 AND (?3 IS NULL OR info = ?3)"
        row = (role, member, None if info is None else json.dumps(dict(info)))
        await self._call(lambda db: db.execute(query, row))

    async def members(self, role: str) -> dict[str, dict[str, str]]:
        query = "SELECT member, info FROM members WHERE role = ? AND expires_s > ? ORDER BY member"
        rows = await self._call(lambda db: db.execute(query, (role, time.time())).fetchall())
        return {member: json.loads(info) for member, info in rows}

    async def increment(self, counter: str, least: int = 1) -> int:
        query = (
            "INSERT INTO counters VALUES (?1, ?2) ON CONFLICT (name) DO UPDATE SET value = max(value + 1, ?2)"
            " RETURNING value"
        )
        rows = await self._call(lambda db: db.execute(query, (counter, least)).fetchall())
        return int(rows[0][0])

    async def acquire(self, name: str, owner: str, ttl_s: float = LEASE_TTL_S) -> bool:
        now_s = time.time()
        query = (
            "INSERT INTO leases VALUES (?1, ?2, ?3) ON CONFLICT (name) DO UPDATE SET owner = ?2, expires_s = ?3 "
            "WHERE owner = ?2 OR expires_s <= ?4 RETURNING owner"
        )
        rows = await self._call(lambda db: db.execute(query, (name, owner, now_s + ttl_s, now_s)).fetchall())
        return bool(rows)

    async def release(self, name: str, owner: str) -> None:
        await self._call(lambda db: db.execute("DELETE FROM leases WHERE name = ? AND owner = ?", (name, owner)))

    async def draw(self, owner: str, draws: Sequence[Draw]) -> Drawn:
        return await self._call(lambda db: _draw(db, owner, draws))

    async def close(self) -> None:
        self._closed = True
        await asyncio.get_running_loop().run_in_executor(self._thread, self._db.close)
        self._thread.shutdown()


def _draw(db: sqlite3.Connection, owner: str, draws: Sequence[Draw]) -> Drawn:
    db.execute("BEGIN IMMEDIATE")
    try:
        now_s = time.time()
        found = db.execute("SELECT levels, at_s FROM buckets WHERE owner = ?", (owner,)).fetchone()
        levels, at_s = (json.loads(found[0]), found[1]) if found else ({}, now_s)
        drawn = draw(draws, levels, now_s - at_s)
        left = {d.name: level for d, level in zip(draws, drawn.levels, strict=True)}
        db.execute("INSERT OR REPLACE INTO buckets VALUES (?, ?, ?)", (owner, json.dumps(left), now_s))
    except BaseException:
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")
    return drawn


# The server's clock decides for everybody. A role is one sorted set (member by expiry) and one hash (member to info):
# reading a role costs its members, whatever else the server holds.
_REGISTER = """
local now = redis.call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
redis.call('ZADD', KEYS[1], now_ms + ARGV[3], ARGV[1])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
return 1
"""
_UNREGISTER = """
if ARGV[2] and redis.call('HGET', KEYS[2], ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[2], ARGV[1])
return 1
"""
_MEMBERS = """
local now = redis.call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
for _, gone in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now_ms)) do
  redis.call('ZREM', KEYS[1], gone)
  redis.call('HDEL', KEYS[2], gone)
end
return redis.call('HGETALL', KEYS[2])
"""
_ACQUIRE = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
_INCREMENT = """
local last = tonumber(redis.call('GET', KEYS[1]) or '0')
local next = string.format('%.0f', math.max(last + 1, tonumber(ARGV[1])))
redis.call('SET', KEYS[1], next)
return next
"""
# The same as `buckets.draw`. Whoever has not drawn for a minute has full buckets: nothing need be kept.
_DRAW = """
local now = redis.call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
local elapsed_ms = math.max(0, now_ms - tonumber(redis.call('HGET', KEYS[1], 'at') or now_ms))
local levels, granted = {}, 1
for i = 1, #ARGV, 3 do
  local per_min, cost = tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2])
  local level = tonumber(redis.call('HGET', KEYS[1], 'level:' .. ARGV[i]) or per_min)
  level = math.min(per_min, level + elapsed_ms * per_min / 60000)
  if level < cost then granted = 0 end
  levels[#levels + 1] = level
end
for i, level in ipairs(levels) do
  levels[i] = string.format('%.6f', level - granted * tonumber(ARGV[3 * i]))
  redis.call('HSET', KEYS[1], 'level:' .. ARGV[3 * i - 2], levels[i])
end
redis.call('HSET', KEYS[1], 'at', now_ms)
redis.call('PEXPIRE', KEYS[1], 60000)
return {granted, unpack(levels)}
"""
_RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


def _role_keys(role: str) -> list[str]:
    """Both on one shard of a cluster: the braces name the part that is hashed."""
    return [f"fastserve:expiry:{{{role}}}", f"fastserve:members:{{{role}}}"]


class RedisState:
    """Keys under `fastserve:`."""

    def __init__(self, url: str) -> None:
        # Everybody who asks has a loop of its own that asks again; a client that retried would only answer later.
        self._redis = redis.asyncio.Redis.from_url(
            url,
            decode_responses=True,
            socket_timeout=_REDIS_TIMEOUT_S,
            socket_connect_timeout=_REDIS_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
        )
        self._register = self._redis.register_script(_REGISTER)
        self._unregister = self._redis.register_script(_UNREGISTER)
        self._members = self._redis.register_script(_MEMBERS)
        self._increment = self._redis.register_script(_INCREMENT)
        self._acquire = self._redis.register_script(_ACQUIRE)
        self._release = self._redis.register_script(_RELEASE)
        self._draw = self._redis.register_script(_DRAW)

    @contextlib.asynccontextmanager
    async def _errors(self) -> AsyncIterator[None]:
        """A call that is cancelled ends as cancelled, whatever the client makes of it: a caller that goes on and tries
        again would never end."""
        task = asyncio.current_task()
        before = task.cancelling() if task else 0
        try:
            yield
        except (redis.exceptions.RedisError, OSError) as error:
            if task and task.cancelling() > before:
                raise asyncio.CancelledError from error
            raise StateError(str(error)) from error
        if task and task.cancelling() > before:
            raise asyncio.CancelledError

    async def register(self, role: str, member: str, info: Mapping[str, str], ttl_s: float = LEASE_TTL_S) -> None:
        async with self._errors():
            await self._register(keys=_role_keys(role), args=[member, json.dumps(dict(info)), int(ttl_s * 1000)])

    async def unregister(self, role: str, member: str, info: Mapping[str, str] | None = None) -> None:
        args = [member] if info is None else [member, json.dumps(dict(info))]
        async with self._errors():
            await self._unregister(keys=_role_keys(role), args=args)

    async def members(self, role: str) -> dict[str, dict[str, str]]:
        async with self._errors():
            flat = await self._members(keys=_role_keys(role))
        pairs = flat.items() if isinstance(flat, dict) else zip(flat[::2], flat[1::2], strict=True)
        return {member: json.loads(info) for member, info in sorted(pairs)}

    async def increment(self, counter: str, least: int = 1) -> int:
        async with self._errors():
            return int(await self._increment(keys=[f"fastserve:counter:{counter}"], args=[least]))

    async def acquire(self, name: str, owner: str, ttl_s: float = LEASE_TTL_S) -> bool:
        async with self._errors():
            return bool(await self._acquire(keys=[f"fastserve:lease:{name}"], args=[owner, int(ttl_s * 1000)]))

    async def release(self, name: str, owner: str) -> None:
        async with self._errors():
            await self._release(keys=[f"fastserve:lease:{name}"], args=[owner])

    async def draw(self, owner: str, draws: Sequence[Draw]) -> Drawn:
        args = [arg for d in draws for arg in (d.name, d.per_min, d.cost)]
        async with self._errors():
            granted, *left = await self._draw(keys=[f"fastserve:buckets:{owner}"], args=args)
        levels = tuple(float(level) for level in left)
        waits_s = [0.0 if granted else d.until_enough_s(level) for d, level in zip(draws, levels, strict=True)]
        return Drawn(bool(granted), levels, max(waits_s, default=0.0))

    async def close(self) -> None:
        await self._redis.aclose()


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
