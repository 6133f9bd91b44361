"""One contract, two stores: an SQLite file and a real Redis. Time is waited for by condition, never slept away."""

import asyncio
import contextlib
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import pytest
import redis.exceptions

from fastserve_common.buckets import Draw, Drawn
from fastserve_common.state import (
    LEASE_TTL_S,
    Occupied,
    RedisState,
    SqliteState,
    StateError,
    StateStore,
    membership,
    open_state,
)

TTL_S = 0.3

OPEN_AND_COUNT = """
import asyncio, sys
from fastserve_common.state import open_state
async def main():
    store = open_state(sys.argv[1])
    for _ in range(20):
        print(await store.increment("n"))
    await store.close()
asyncio.run(main())
"""


@pytest.fixture(params=["sqlite", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "redis":
        return str(request.getfixturevalue("redis_url"))
    return f"sqlite://{tmp_path}/nested/state.db"


@pytest.fixture
async def store(url: str) -> AsyncIterator[StateStore]:
    opened = open_state(url)
    yield opened
    await opened.close()


@pytest.fixture
async def other(url: str) -> AsyncIterator[StateStore]:
    """The same store as another process opens it."""
    opened = open_state(url)
    yield opened
    await opened.close()


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(10):
        while not await condition():  # noqa: ASYNC110 - the state is another process's
            await asyncio.sleep(0.01)


async def test_members_are_seen_by_others_in_name_order(store: StateStore, other: StateStore) -> None:
    await store.register("stage", "stage-1", {"address": "b:2"})
    await store.register("stage", "stage-0", {"address": "a:1", "note": "ünïcode {}"})
    await store.register("gateway", "g", {})
    assert list((await other.members("stage")).items()) == [
        ("stage-0", {"address": "a:1", "note": "ünïcode {}"}),
        ("stage-1", {"address": "b:2"}),
    ]
    assert await other.members("gateway") == {"g": {}}
    assert await other.members("nobody") == {}


async def test_registering_again_replaces_the_facts(store: StateStore, other: StateStore) -> None:
    await store.register("stage", "s", {"incarnation": "1"})
    await store.register("stage", "s", {"incarnation": "2"})
    assert await other.members("stage") == {"s": {"incarnation": "2"}}
    await store.unregister("stage", "s")
    await store.unregister("stage", "s")
    assert await other.members("stage") == {}


async def test_whoever_leaves_does_not_take_along_another_that_has_its_name(
    store: StateStore, other: StateStore
) -> None:
    """A scheduler that has lost the lead ends after the next one has registered."""
    old, new = {"incarnation": "old"}, {"incarnation": "new"}
    await store.register("scheduler", "leader", old)
    await other.register("scheduler", "leader", new)
    await store.unregister("scheduler", "leader", old)
    assert await other.members("scheduler") == {"leader": new}
    await store.unregister("scheduler", "leader", new)
    assert await other.members("scheduler") == {}


async def test_a_member_that_does_not_renew_vanishes_and_may_return(store: StateStore, other: StateStore) -> None:
    await store.register("stage", "s", {"n": "1"}, TTL_S)
    assert await other.members("stage") == {"s": {"n": "1"}}

    async def gone() -> bool:
        return await other.members("stage") == {}

    await until(gone)
    await store.register("stage", "s", {"n": "2"}, TTL_S)
    assert await other.members("stage") == {"s": {"n": "2"}}


async def test_membership_renews_while_it_lasts_and_leaves_at_the_end(store: StateStore, other: StateStore) -> None:
    loop = asyncio.get_running_loop()
    async with membership(store, "stage", "s", {"k": "v"}, TTL_S):
        end = loop.time() + 3 * TTL_S  # several lifetimes: without renewal it would be gone

        async def seen_all_along() -> bool:
            assert await other.members("stage") == {"s": {"k": "v"}}
            return loop.time() > end

        await until(seen_all_along)
    assert await other.members("stage") == {}


async def test_one_leader_at_a_time(store: StateStore, other: StateStore) -> None:
    assert await store.acquire("scheduler", "a")
    assert not await other.acquire("scheduler", "b")
    assert await store.acquire("scheduler", "a"), "the holder renews"
    await other.release("scheduler", "b")
    assert not await other.acquire("scheduler", "b"), "only the holder can give it up"
    await store.release("scheduler", "a")
    assert await other.acquire("scheduler", "b")


async def test_a_leader_that_does_not_renew_is_followed(store: StateStore, other: StateStore) -> None:
    assert await store.acquire("scheduler", "a", TTL_S)

    async def taken_over() -> bool:
        return await other.acquire("scheduler", "b")

    await until(taken_over)
    assert not await store.acquire("scheduler", "a")


async def test_of_many_that_try_at_once_one_leads(store: StateStore, other: StateStore) -> None:
    tries = [(store if i % 2 else other).acquire("scheduler", str(i)) for i in range(20)]
    assert sum(await asyncio.gather(*tries)) == 1


def test_counters_never_repeat_a_value_across_processes(url: str) -> None:
    command = [sys.executable, "-c", OPEN_AND_COUNT, url]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    printed = [process.communicate(timeout=60) for process in processes]
    values = sorted(int(line) for out, _ in printed for line in out.split())
    assert values == list(range(1, 81))


async def test_a_counter_is_never_below_what_its_reader_knows(store: StateStore, other: StateStore) -> None:
    assert [await store.increment("n"), await other.increment("n")] == [1, 2]
    assert await store.increment("n", least=2) == 3
    assert await other.increment("n", least=1_790_000_000) == 1_790_000_000
    assert await store.increment("n") == 1_790_000_001
    assert await store.increment("large", least=2**52) == 2**52
    assert await other.increment("large") == 2**52 + 1


async def test_a_bucket_is_drawn_from_by_all_and_fills_by_itself(store: StateStore, other: StateStore) -> None:
    half = Draw("requests", per_min=120, cost=60)
    first, second = await store.draw("a", [half]), await other.draw("a", [half])
    assert first.granted
    assert second.granted, "what the first left"
    assert second.levels[0] < first.levels[0]
    assert (await store.draw("b", [half])).levels[0] == pytest.approx(60), "another owner's is another's"
    refused = await store.draw("a", [half])
    assert not refused.granted
    assert 0 < refused.wait_s <= 30
    assert not (await other.draw("a", [half])).granted, "a refusal takes nothing, and gives nothing"
    one = Draw("requests", per_min=120, cost=1)

    async def granted() -> bool:
        return (await other.draw("a", [one])).granted

    await until(granted)


async def test_of_two_buckets_both_are_drawn_from_or_none(store: StateStore) -> None:
    requests, tokens = Draw("requests", 2, 1), Draw("tokens", 1000, 900)
    drawn = await store.draw("a", [requests, tokens])
    assert drawn.granted
    assert drawn.levels == pytest.approx((1, 100))
    refused = await store.draw("a", [requests, tokens])
    assert not refused.granted
    assert refused.levels[0] >= 1, "the request was not counted"
    assert refused.wait_s == pytest.approx(tokens.until_enough_s(refused.levels[1]))
    assert (await store.draw("a", [requests])).granted
    assert not (await store.draw("a", [Draw("requests", 2, 3)])).granted, "more than it can hold"


async def test_of_many_that_draw_at_once_as_many_get_as_there_is(store: StateStore, other: StateStore) -> None:
    one = Draw("requests", per_min=5, cost=1)
    begun_s = time.monotonic()
    drawn = await asyncio.gather(*((store if n % 2 else other).draw("a", [one]) for n in range(20)))
    num_filled = (time.monotonic() - begun_s + 1) * 5 / 60
    assert 5 <= sum(d.granted for d in drawn) <= 5 + num_filled


async def test_what_is_saved_is_found_by_others_until_it_is_replaced(store: StateStore, other: StateStore) -> None:
    assert await store.saved("n") is None
    assert await store.save("n", '{"ünïcode": 1}', 7)
    assert await other.saved("n") == '{"ünïcode": 1}'
    assert await other.save("n", "", 7), "whoever wrote it may write again"
    assert await store.saved("n") == "", "nothing is something"
    assert await store.saved("m") is None


async def test_whoever_is_behind_does_not_save_over_those_who_are_ahead(store: StateStore, other: StateStore) -> None:
    """A scheduler that has lost the lead, and does not know it yet."""
    assert await other.save("n", "new", 1_790_000_001)
    assert not await store.save("n", "old", 1_790_000_000)
    assert await store.saved("n") == "new"
    assert await store.save("n", "newer", 1_790_000_002)
    assert await other.saved("n") == "newer"


async def test_places_are_shared_by_all_holders(store: StateStore, other: StateStore) -> None:
    assert await store.occupy("key", "a", 0, 2, 3, 60) == Occupied(True, 2)
    assert await other.occupy("key", "b", 0, 2, 3, 60) == Occupied(False, 2), "all of them or none"
    assert await other.occupy("key", "b", 0, 1, 3, 60) == Occupied(True, 3)
    assert await store.occupy("key", "a", 2, 1, 3, 60) == Occupied(False, 3)
    assert await other.occupy("another", "b", 0, 3, 3, 60) == Occupied(True, 3)
    assert await store.occupy("key", "a", 1, 0, 3, 60) == Occupied(True, 2), "one was given back"
    assert await other.occupy("key", "b", 1, 1, 3, 60) == Occupied(True, 3)
    assert await other.occupy("key", "b", 0, 0, 3, 60) == Occupied(True, 1)
    assert await store.occupy("key", "a", 0, 0, 3, 60) == Occupied(True, 0)


async def test_what_a_holder_says_is_the_truth_also_for_a_store_that_forgot(store: StateStore) -> None:
    assert await store.occupy("key", "a", 5, 0, 3, 60) == Occupied(True, 5), "more than the limit, which was lowered"
    assert await store.occupy("key", "b", 0, 1, 3, 60) == Occupied(False, 5)
    assert await store.occupy("key", "a", 2, 0, 3, 60) == Occupied(True, 2)
    assert await store.occupy("key", "b", 0, 1, 3, 60) == Occupied(True, 3)


async def test_the_places_of_a_holder_that_is_gone_are_free_again(store: StateStore, other: StateStore) -> None:
    assert (await store.occupy("key", "gone", 0, 3, 3, TTL_S)).granted
    await store.occupy("key", "lives", 0, 0, 3, 60)

    async def granted() -> bool:
        return (await other.occupy("key", "b", 0, 3, 3, 60)).granted

    await until(granted)
    assert not (await store.occupy("key", "gone", 0, 1, 3, 60)).granted


async def test_of_many_that_want_a_place_at_once_as_many_get_one_as_there_are(
    store: StateStore, other: StateStore
) -> None:
    tries = [(store if n % 2 else other).occupy("key", str(n), 0, 1, 5, 60) for n in range(20)]
    assert sum(occupied.granted for occupied in await asyncio.gather(*tries)) == 5


async def test_buckets_fill_by_the_clock_of_the_server(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store, ahead = open_state(redis_url), open_state(redis_url)
    all_of_it = Draw("requests", per_min=2, cost=2)
    assert (await store.draw("a", [all_of_it])).granted
    now_s = time.time
    monkeypatch.setattr(time, "time", lambda: now_s() + 3600)
    assert not (await ahead.draw("a", [all_of_it])).granted
    await store.close()
    await ahead.close()


async def test_an_unreachable_store_is_a_state_error(tmp_path: Path) -> None:
    store = open_state("redis://127.0.0.1:1/0")
    with pytest.raises(StateError):
        await store.members("stage")
    await store.close()
    (tmp_path / "state.db").mkdir()
    with pytest.raises(StateError):
        open_state(f"sqlite://{tmp_path}/state.db")


@pytest.mark.parametrize("url", ["", "state.db", "postgres://x"])
def test_an_unknown_kind_of_store_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="expected sqlite:///path or redis://"):
        open_state(url)


async def test_membership_survives_a_store_that_is_away_for_a_while() -> None:
    store = Flaky()
    async with membership(store, "stage", "s", {}, ttl_s=0.03):
        store.away = True

        async def several_renewals_failed() -> bool:
            return store.failures >= 3

        await until(several_renewals_failed)
        store.away = False
        calls = store.calls

        async def renewed() -> bool:
            return store.calls > calls

        await until(renewed)
        store.away = True  # leaving must not fail either


class Flaky:
    """A store that can be away. Only what membership uses does anything."""

    def __init__(self) -> None:
        self.away = False
        self.calls = 0
        self.failures = 0

    async def register(self, role: str, member: str, info: object, ttl_s: float = LEASE_TTL_S) -> None:
        if self.away:
            self.failures += 1
            raise StateError("away")
        self.calls += 1

    async def unregister(self, role: str, member: str, info: object = None) -> None:
        if self.away:
            raise StateError("away")

    async def members(self, role: str) -> dict[str, dict[str, str]]:
        return {}

    async def increment(self, counter: str, least: int = 1) -> int:
        return least

    async def acquire(self, name: str, owner: str, ttl_s: float = LEASE_TTL_S) -> bool:
        return True

    async def release(self, name: str, owner: str) -> None:
        return None

    async def draw(self, owner: str, draws: Sequence[Draw]) -> Drawn:
        return Drawn(True, (), 0.0)

    async def occupy(self, owner: str, holder: str, held: int, more: int, limit: int, ttl_s: float) -> Occupied:
        return Occupied(True, held + more)

    async def save(self, name: str, value: str, version: int) -> bool:
        return True

    async def saved(self, name: str) -> str | None:
        return None

    async def close(self) -> None:
        return None


async def test_a_file_is_not_closed_under_a_call_that_was_cancelled(tmp_path: Path) -> None:
    """A cancelled call leaves its thread at work; closing the database under it would crash the process."""
    store = SqliteState(tmp_path / "state.db")
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def work(db: sqlite3.Connection) -> None:
        begun.set()
        go_on.wait(10)
        db.execute("SELECT 1")
        ended.set()

    call = asyncio.create_task(store._call(work))
    await asyncio.to_thread(begun.wait, 10)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    closing = asyncio.create_task(store.close())
    await asyncio.sleep(0)
    assert not closing.done()
    go_on.set()
    await closing
    assert ended.is_set()


@pytest.mark.parametrize("deafly", ["answers", "fails"])
async def test_a_cancelled_call_ends_even_if_the_client_swallows_that(deafly: str) -> None:
    store = RedisState("redis://127.0.0.1:1")

    async def deaf(**_: object) -> int:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        if deafly == "fails":
            raise redis.exceptions.ConnectionError("closed")
        return 1

    store._register = deaf  # type: ignore[assignment]  # a client that is worse than any
    call = asyncio.create_task(store.register("stage", "stage-0", {}))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await store.close()
