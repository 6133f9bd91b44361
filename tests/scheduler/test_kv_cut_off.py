"""A network that swallows everything between scheduler and kvstore, without a word to either."""

import asyncio
from pathlib import Path

import pytest
from tests.links.network import Network

from fastserve_common import channels
from fastserve_common.channels import Keepalive
from fastserve_common.state import SqliteState
from fastserve_scheduler import kv_link
from fastserve_scheduler.inbox import Inbox
from fastserve_scheduler.inputs import HostGranted, HostLost, Input
from fastserve_scheduler.kv_link import KvLink
from fastserve_scheduler.kv_messages import HostArena

from .host import KvStore
from .rig import until, until_async

SLOT_BYTES, NUM_SLOTS = 4096, 20
#: Where the kvstore is known to the scheduler as the one behind the network.
FAR = "far"


async def test_a_dead_network_costs_a_session_when_leases_ran_out_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for the kvstore: keeping and freeing slots needs no answer, and what is in memory is in memory. What
    it took back meanwhile, because nobody renewed it, the scheduler hears when the network is back, and begins anew."""
    monkeypatch.setattr(kv_link, "FIRST_BACKOFF_S", 0.02)
    # The network is back before anybody misses it, on the slowest machine.
    monkeypatch.setattr(channels, "KEEPALIVE", Keepalive(idle_ms=1_000_000, timeout_ms=1_000_000))
    url, store = f"sqlite://{tmp_path / 'state.db'}", SqliteState(tmp_path / "state.db")
    inbox, heard = Inbox[Input](), list[Input]()

    async def listen() -> None:
        while True:
            heard.append(await inbox.get())

    async with KvStore(url, store, NUM_SLOTS * SLOT_BYTES, "--lease-ttl-s", "5") as kvstore:
        network = Network(kvstore.address)
        async with network.running() as address:
            await store.register("kvstore", FAR, {"address": address}, ttl_s=1000)
            attached = await kvstore.attach(SLOT_BYTES)
            link = KvLink(store, "me", 1, inbox)
            tasks = [asyncio.create_task(listen()), asyncio.create_task(link.run())]
            link.aim(HostArena(attached.generation, attached.num_slots, FAR))
            await until(lambda: _granted(heard) >= NUM_SLOTS)
            first = next(event.session for event in heard if isinstance(event, HostGranted))
            first.keep(1, (3, 4))
            await until_async(lambda: _counts(kvstore, (0, NUM_SLOTS - 2, 2)))
            network.whole.clear()
            first.keep(2, (5,))
            await until_async(lambda: _counts(kvstore, (NUM_SLOTS - 2, 0, 2)))
            assert not first.closed
            network.whole.set()
            await until(lambda: HostLost(first) in heard)
            await until(lambda: _granted(heard[heard.index(HostLost(first)) :]) >= NUM_SLOTS)
            await until_async(lambda: _counts(kvstore, (0, NUM_SLOTS, 0)))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    await store.close()


def _granted(heard: list[Input]) -> int:
    return sum(len(event.slots) for event in heard if isinstance(event, HostGranted))


async def _counts(kvstore: KvStore, counts: tuple[int, int, int]) -> bool:
    status = await kvstore.status()
    return (status.free_slots, status.reserved_slots, status.committed_slots) == counts
