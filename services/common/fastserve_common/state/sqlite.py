"""One SQLite file, for the processes of one machine."""

import asyncio
import contextlib
import json
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from fastserve_common.buckets import Draw, Drawn, draw
from fastserve_common.state.store import LEASE_TTL_S, Occupied, StateError

#: How long a process waits for another one's write to the file.
_BUSY_TIMEOUT_S = 5.0

T = TypeVar("T")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS members (role TEXT, member TEXT, info TEXT, expires_s REAL, PRIMARY KEY (role, member));
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER);
CREATE TABLE IF NOT EXISTS leases (name TEXT PRIMARY KEY, owner TEXT, expires_s REAL);
CREATE TABLE IF NOT EXISTS buckets (owner TEXT PRIMARY KEY, levels TEXT, at_s REAL);
CREATE TABLE IF NOT EXISTS places (owner TEXT, holder TEXT, held INTEGER, expires_s REAL, PRIMARY KEY (owner, holder));
CREATE TABLE IF NOT EXISTS notes (name TEXT PRIMARY KEY, value TEXT, version INTEGER);
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

    async def occupy(self, owner: str, holder: str, held: int, more: int, limit: int, ttl_s: float) -> Occupied:
        return await self._call(lambda db: _occupy(db, owner, holder, held, more, limit, ttl_s))

    async def save(self, name: str, value: str, version: int) -> bool:
        query = (
            "INSERT INTO notes VALUES (?1, ?2, ?3) ON CONFLICT (name) DO UPDATE SET value = ?2, version = ?3 "
            "WHERE version <= ?3 RETURNING version"
        )
        return bool(await self._call(lambda db: db.execute(query, (name, value, version)).fetchall()))

    async def saved(self, name: str) -> str | None:
        query = "SELECT value FROM notes WHERE name = ?"
        row = await self._call(lambda db: db.execute(query, (name,)).fetchone())
        return None if row is None else str(row[0])

    async def close(self) -> None:
        self._closed = True
        await asyncio.get_running_loop().run_in_executor(self._thread, self._db.close)
        self._thread.shutdown()


@contextlib.contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Nobody writes in between."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")


def _draw(db: sqlite3.Connection, owner: str, draws: Sequence[Draw]) -> Drawn:
    with _transaction(db):
        now_s = time.time()
        found = db.execute("SELECT levels, at_s FROM buckets WHERE owner = ?", (owner,)).fetchone()
        levels, at_s = (json.loads(found[0]), found[1]) if found else ({}, now_s)
        drawn = draw(draws, levels, now_s - at_s)
        left = {d.name: level for d, level in zip(draws, drawn.levels, strict=True)}
        db.execute("INSERT OR REPLACE INTO buckets VALUES (?, ?, ?)", (owner, json.dumps(left), now_s))
    return drawn


def _occupy(
    db: sqlite3.Connection, owner: str, holder: str, held: int, more: int, limit: int, ttl_s: float
) -> Occupied:
    with _transaction(db):
        now_s = time.time()
        db.execute("DELETE FROM places WHERE owner = ?1 AND (expires_s <= ?2 OR holder = ?3)", (owner, now_s, holder))
        others = db.execute("SELECT coalesce(sum(held), 0) FROM places WHERE owner = ?", (owner,)).fetchone()[0]
        granted = more == 0 or others + held + more <= limit
        mine = held + more if granted else held
        if mine:
            db.execute("INSERT INTO places VALUES (?, ?, ?, ?)", (owner, holder, mine, now_s + ttl_s))
    return Occupied(granted, others + mine)
