"""The link to the kvstore, against the kvstore's own code: slots come ahead, are kept and freed, and go all at once."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fastserve_common.state import SqliteState
from fastserve_scheduler import kv_link, kv_session, slot_book
from fastserve_scheduler.inbox import Inbox
from fastserve_scheduler.inputs import HostGranted, HostLost, Input
from fastserve_scheduler.kv_link import KvLink
from fastserve_scheduler.kv_messages import HostArena
from fastserve_scheduler.kv_session import KvSession

from .host import NODE, KvStore
from .rig import until, until_async

SLOT_BYTES = 4096
NUM_SLOTS = 20


class Rig:
    """Links to one kvstore, and what they said."""

    def __init__(self, folder: Path) -> None:
        self.url = f"sqlite://{folder / 'state.db'}"
        self.store = SqliteState(folder / "state.db")
        self.inbox: Inbox[Input] = Inbox()
        self.granted: list[HostGranted] = []
        self.lost: list[KvSession] = []
        self._tasks = [asyncio.create_task(self._listen())]

    def kvstore(self, *flags: str) -> KvStore:
        return KvStore(self.url, self.store, NUM_SLOTS * SLOT_BYTES, *flags)

    def link(self, scheduler_id: str = "me", epoch: int = 1) -> KvLink:
        link = KvLink(self.store, scheduler_id, epoch, self.inbox)
        self._tasks.append(asyncio.create_task(link.run()))
        return link

    async def _listen(self) -> None:
        while True:
            match await self.inbox.get():
                case HostGranted() as granted:
                    self.granted.append(granted)
                case HostLost(session):
                    self.lost.append(session)
                case other:
                    raise AssertionError(other)

    def slots_of(self, session: KvSession) -> list[int]:
        return sorted(slot for granted in self.granted if granted.session is session for slot in granted.slots)

    async def session(self) -> KvSession:
        """The present one, when it has all slots."""
        await until(lambda: bool(self.granted) and len(self.slots_of(self.granted[-1].session)) == NUM_SLOTS)
        return self.granted[-1].session

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for outcome in await asyncio.gather(*self._tasks, return_exceptions=True):
            assert isinstance(outcome, asyncio.CancelledError), outcome
        await self.store.close()


@pytest.fixture
async def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    monkeypatch.setattr(slot_book, "LEASE_CHUNK_SLOTS", 8)
    monkeypatch.setattr(kv_link, "FIRST_BACKOFF_S", 0.02)
    rig = Rig(tmp_path)
    yield rig
    await rig.close()


async def _arena(kvstore: KvStore) -> HostArena:
    """What a stage would say of it."""
    attached = await kvstore.attach(SLOT_BYTES)
    return HostArena(attached.generation, attached.num_slots, NODE)


async def _counts(kvstore: KvStore) -> tuple[int, int, int]:
    status = await kvstore.status()
    return status.free_slots, status.reserved_slots, status.committed_slots


async def _until_counts(kvstore: KvStore, counts: tuple[int, int, int]) -> None:
    async def there() -> bool:
        return await _counts(kvstore) == counts

    await until_async(there)


async def test_all_slots_are_leased_ahead_and_what_is_kept_is_committed(rig: Rig) -> None:
    async with rig.kvstore() as kvstore:
        rig.link().aim(await _arena(kvstore))
        session = await rig.session()
        assert rig.slots_of(session) == list(range(NUM_SLOTS))
        assert await _counts(kvstore) == (0, NUM_SLOTS, 0)
        session.keep(1, (3, 4, 5))
        session.keep(2, (0,))
        await _until_counts(kvstore, (0, NUM_SLOTS - 4, 4))
        session.free(1, (4, 5))
        session.free(2, (0, 7))
        await _until_counts(kvstore, (3, NUM_SLOTS - 4, 1))
        session.keep(3, (0, 4))
        await _until_counts(kvstore, (0, NUM_SLOTS - 3, 3))
        assert len(rig.granted) == 3, "slots that are leased again are nothing new"
        assert not rig.lost


async def test_slots_of_another_generation_than_the_stages_have_are_not_granted(rig: Rig) -> None:
    async with rig.kvstore() as kvstore:
        arena = await _arena(kvstore)
        link = rig.link()
        link.aim(HostArena(arena.generation + 1, arena.num_slots, NODE))
        await _until_counts(kvstore, (NUM_SLOTS, 0, 0))
        link.aim(HostArena(arena.generation, arena.num_slots + 1, NODE))
        link.aim(arena)
        await rig.session()
        assert {granted.session.arena for granted in rig.granted} == {arena}


async def test_when_the_stages_part_everything_is_given_up(rig: Rig) -> None:
    async with rig.kvstore() as kvstore:
        arena, link = await _arena(kvstore), rig.link()
        link.aim(arena)
        session = await rig.session()
        session.keep(1, (0, 1))
        link.aim(None)
        assert session.closed, "at once: nothing may be planned with its slots"
        await until(lambda: rig.lost == [session])
        link.aim(arena)
        await until(lambda: rig.granted[-1].session is not session)
        assert rig.slots_of(await rig.session()) == list(range(NUM_SLOTS))
        await _until_counts(kvstore, (0, NUM_SLOTS, 0))


async def test_a_kvstore_that_is_killed_loses_everything_and_the_next_one_is_found(rig: Rig) -> None:
    async with rig.kvstore() as kvstore:
        link = rig.link()
        link.aim(await _arena(kvstore))
        for number in range(1, 4):
            session = await rig.session()
            session.keep(number, (0, 1))
            await kvstore.kill()
            await until(lambda: len(rig.lost) == number)  # noqa: B023 - called here only
            session.keep(number, (2,))  # of a session that is over: means nothing
            await kvstore.start()
            link.aim(await _arena(kvstore))
            await until(lambda: rig.granted[-1].session is not session)  # noqa: B023 - called here only
            await rig.session()
            assert await _counts(kvstore) == (0, NUM_SLOTS, 0)


async def test_another_layout_is_another_generation(rig: Rig) -> None:
    async with rig.kvstore() as kvstore:
        rig.link().aim(await _arena(kvstore))
        session = await rig.session()
        await kvstore.attach(2 * SLOT_BYTES)
        await until(lambda: rig.lost == [session])


async def test_leases_are_renewed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    renewals = 0
    renew = slot_book.SlotBook.renew

    def counted(book: slot_book.SlotBook) -> object:
        nonlocal renewals
        renewals += 1
        return renew(book)

    monkeypatch.setattr(slot_book.SlotBook, "renew", counted)
    async with rig.kvstore("--lease-ttl-s", "2") as kvstore:
        rig.link().aim(await _arena(kvstore))
        session = await rig.session()
        session.keep(1, range(NUM_SLOTS))
        await until(lambda: renewals >= 2)  # a lease that holds nothing is not there
        session.free(1, (5,))
        session.keep(2, (5,))
        session.free(1, (6,))
        session.keep(2, ())
        await until(lambda: renewals >= 2 + 2 * kv_session.RENEWALS_PER_LEASE)
        assert await _counts(kvstore) == (0, 1, NUM_SLOTS - 1)
        assert not rig.lost


async def test_a_lease_that_ran_out_costs_the_session(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when this process was stopped for a while."""
    monkeypatch.setattr(kv_session, "RENEWALS_PER_LEASE", 0.2)
    async with rig.kvstore("--lease-ttl-s", "0.2") as kvstore:
        rig.link().aim(await _arena(kvstore))
        await until(lambda: len(rig.lost) >= 1)
        await until(lambda: rig.granted[-1].session not in rig.lost)


async def test_a_refused_command_costs_the_session(rig: Rig) -> None:
    """The two accounts disagree: nothing that was stored can be trusted."""
    async with rig.kvstore() as kvstore:
        rig.link().aim(await _arena(kvstore))
        session = await rig.session()
        session.keep(1, (NUM_SLOTS,))
        await until(lambda: rig.lost == [session])
        await until(lambda: rig.granted[-1].session is not session)


async def test_the_next_scheduler_takes_the_slots_and_an_older_one_is_refused(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    async with rig.kvstore() as kvstore:
        arena = await _arena(kvstore)
        rig.link("old", 1).aim(arena)
        old = await rig.session()
        old.keep(1, (0,))
        await _until_counts(kvstore, (0, NUM_SLOTS - 1, 1))
        rig.link("new", 2).aim(arena)
        await until(lambda: rig.lost == [old])
        await until(lambda: rig.granted[-1].session is not old)
        assert rig.slots_of(await rig.session()) == list(range(NUM_SLOTS))
        await until(lambda: "epoch 1 is over" in caplog.text)
        assert await _counts(kvstore) == (0, NUM_SLOTS, 0)


async def test_a_kvstore_that_is_not_there_yet_is_waited_for(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    kvstore = rig.kvstore()
    start = await rig.store.increment(f"kvstore-starts:{NODE}", least=1 << 40) + 1
    rig.link().aim(HostArena(start << 20, NUM_SLOTS, NODE))
    await until(lambda: "no member of the cluster" in caplog.text)
    async with kvstore:
        assert await _arena(kvstore) == HostArena(start << 20, NUM_SLOTS, NODE)
        await rig.session()
