"""The scheduler's one door."""

import asyncio

from fastserve_scheduler.inbox import Inbox


async def test_the_cluster_goes_first_and_lanes_keep_their_order() -> None:
    inbox: Inbox[str] = Inbox()
    await inbox.put("gateway 1")
    await inbox.put("gateway 2")
    inbox.put_now("stage 1")
    inbox.put_now("stage 2")
    assert [await inbox.get() for _ in range(4)] == ["stage 1", "stage 2", "gateway 1", "gateway 2"]


async def test_a_full_lane_holds_its_senders_back_and_the_cluster_never() -> None:
    inbox: Inbox[int] = Inbox(limit=2)
    senders = [asyncio.create_task(inbox.put(n)) for n in range(5)]
    await asyncio.sleep(0)
    assert [sender.done() for sender in senders] == [True, True, False, False, False]
    for n in range(100, 110):
        inbox.put_now(n)
    assert len(inbox) == 12
    got = [await inbox.get() for _ in range(15)]
    assert got == [*range(100, 110), 0, 1, 2, 3, 4]
    assert all(sender.done() for sender in senders)


async def test_get_waits_for_the_next_message() -> None:
    inbox: Inbox[int] = Inbox()
    getter = asyncio.create_task(inbox.get())
    await asyncio.sleep(0)
    assert not getter.done()
    inbox.put_now(1)
    assert await getter == 1
