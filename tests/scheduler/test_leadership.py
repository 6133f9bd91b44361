"""The generation of a leader is higher than that of every leader before, whatever the store has forgotten."""

import asyncio
from pathlib import Path

import pytest

from fastserve_common.state import SqliteState, StateError, StateStore
from fastserve_scheduler.leadership import LEASE, MEMBER, ROLE, Leadership

NOW_S = 1_000_000.0


def leadership(store: StateStore, owner: str, now_s: float = NOW_S) -> Leadership:
    return Leadership(store, owner, ttl_s=0.06, clock_s=lambda: now_s)


async def test_generations_rise_within_a_second(tmp_path: Path) -> None:
    store = SqliteState(tmp_path / "state.db")
    for expected in range(3):
        one = leadership(store, f"owner-{expected}")
        assert await one.acquire() == NOW_S + expected
        await one.give_up()
    await store.close()


async def test_a_store_that_was_wiped_does_not_take_generations_back(tmp_path: Path) -> None:
    """The old leader may still talk to the stages, and they obey the higher epoch alone."""
    before, after = SqliteState(tmp_path / "before.db"), SqliteState(tmp_path / "after.db")
    old = await leadership(before, "old").acquire()
    assert await leadership(after, "new", NOW_S + 1).acquire() > old
    await before.close()
    await after.close()


async def test_a_standby_with_a_slow_clock_follows_the_leader_that_it_saw(tmp_path: Path) -> None:
    store = SqliteState(tmp_path / "state.db")
    first, standby = leadership(store, "first"), leadership(store, "standby", NOW_S - 500)
    generation = await first.acquire()
    await store.register(ROLE, MEMBER, first.facts("host:1", generation))
    waiting = asyncio.create_task(standby.acquire())
    async with asyncio.timeout(10):
        while standby._seen < generation:
            await store.acquire(LEASE, "first")
            await asyncio.sleep(0.005)
    wiped = SqliteState(tmp_path / "wiped.db")
    standby.store = wiped
    assert await asyncio.wait_for(waiting, 10) == generation + 1
    await store.close()
    await wiped.close()


class Away(SqliteState):
    """Answers with an error while `away`."""

    away = True

    async def acquire(self, name: str, owner: str, ttl_s: float = 1.0) -> bool:
        if self.away:
            raise StateError("away")
        return await super().acquire(name, owner, ttl_s)


async def test_a_leader_keeps_leading_while_the_store_is_away_and_takes_its_lease_back(tmp_path: Path) -> None:
    store = Away(tmp_path / "state.db")
    store.away = False
    first = leadership(store, "first")
    await first.acquire()
    store.away = True
    keeping = asyncio.create_task(first.keep())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(keeping), 5 * first.ttl_s)
    store.away = False
    await store.release(LEASE, "first")  # as a wipe would
    async with asyncio.timeout(10):
        while await store.acquire(LEASE, "another one", 0.0):  # noqa: ASYNC110 - the lease is the store's
            await asyncio.sleep(0.005)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    await store.close()
