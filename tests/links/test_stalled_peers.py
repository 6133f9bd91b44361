"""A peer that is stopped, or that a network swallows, keeps its connections open and says nothing: both ends of every
link between services give it up, with nothing to say themselves."""

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

import grpc
import grpc.aio
import pytest
from tests.links.network import Network
from tests.links.peer import SilentPeer
from tests.scheduler.rig import PATIENCE_S, until

from fastserve.v1 import scheduler_pb2
from fastserve_common import channels
from fastserve_common.channels import Keepalive, open_channel
from fastserve_common.state import SqliteState
from fastserve_gateway.engine.events import ClusterView
from fastserve_gateway.engine.link import SchedulerLink
from fastserve_scheduler.kv_messages import HostArena, KvHello
from fastserve_scheduler.kv_session import KvSession
from fastserve_scheduler.stage_link import StageLink
from fastserve_worker.forward import ForwardLink

REPOSITORY = Path(__file__).parents[2]
PING_TIMEOUT = "ping timeout"
SHORT = Keepalive(idle_ms=100, timeout_ms=1000)

Echo: TypeAlias = "grpc.aio.StreamStreamCall[bytes, bytes]"

#: Talks to an address until the stream has broken; why it has.
Link = Callable[[str], Awaitable[str]]


async def stage_link(address: str) -> str:
    closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    link = StageLink(
        0, address, "life", lambda link: None, lambda link, message: None, lambda _, why: closed.set_result(why)
    )
    why = await closed
    await link.wait_closed()
    return why


async def forward_link(address: str) -> str:
    broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    link = ForwardLink(address, epoch=1, from_stage=0, on_broken=broken.set_result)
    why = await broken
    await link.wait_closed()
    return why


async def kvstore_link(address: str) -> str:
    session = KvSession(HostArena(1, 1, "node"), KvHello("me", 1), lambda slots: None)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await session.run(address)
    assert session.closed
    return error.value.details() or ""


@pytest.fixture
def short_keepalive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "KEEPALIVE", SHORT)


@contextlib.asynccontextmanager
async def serving(peer: SilentPeer) -> AsyncIterator[str]:
    address = await peer.start()
    try:
        yield address
    finally:
        await peer.stop()


async def both_ends_give_up(peer: SilentPeer, link: Link, established: asyncio.Event) -> None:
    async with serving(peer) as there, asyncio.timeout(PATIENCE_S):
        network = Network(there)
        async with network.running() as address:
            broken = asyncio.ensure_future(link(address))
            await established.wait()
            network.whole.clear()
            assert PING_TIMEOUT in await broken
            await until(lambda: peer.num_open == 0)


@pytest.mark.usefixtures("short_keepalive")
@pytest.mark.parametrize("link", [stage_link, forward_link, kvstore_link])
async def test_a_stream_ends_when_the_network_swallows_everything(link: Link) -> None:
    peer = SilentPeer()
    await both_ends_give_up(peer, link, peer.opened)


@pytest.mark.usefixtures("short_keepalive")
async def test_a_gateway_and_its_scheduler_give_each_other_up(tmp_path: Path) -> None:
    hello = scheduler_pb2.SchedulerMessage(hello=scheduler_pb2.SchedulerHello())
    store, connected = SqliteState(tmp_path / "state.db"), asyncio.Event()

    def note(view: ClusterView) -> None:
        if view.connected:
            connected.set()

    async def converse(address: str) -> str:
        await store.register("scheduler", "leader", {"address": address, "incarnation": "life"}, ttl_s=1000)
        link = SchedulerLink(store, "gateway", reconnect_timeout_s=1000, on_change=note)
        running = asyncio.create_task(link.run())
        await connected.wait()
        await until(lambda: not link.view.connected)
        why = link.view.detail
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return why

    await both_ends_give_up(SilentPeer(hello.SerializeToString()), converse, connected)
    await store.close()


async def test_a_link_on_which_nobody_speaks_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither end takes the other's pings for abuse, however many they are."""
    monkeypatch.setattr(channels, "KEEPALIVE", Keepalive(idle_ms=20, timeout_ms=10_000))
    async with serving(SilentPeer(echoes=True)) as there, asyncio.timeout(PATIENCE_S):
        network = Network(there)
        async with network.running() as address, open_channel(address) as channel:
            call: Echo = channel.stream_stream("/fastserve.v1.Stage/Control")()
            await echoed(call)
            before = network.num_carried
            await until(lambda: network.num_carried >= before + 40)
            await echoed(call)


@pytest.mark.cluster
@pytest.mark.usefixtures("short_keepalive")
async def test_a_process_that_is_stopped_is_given_up() -> None:
    """Its kernel goes on taking what it is sent."""
    command = (sys.executable, "-m", "tests.links.peer")
    peer = await asyncio.create_subprocess_exec(*command, cwd=REPOSITORY, stdout=subprocess.PIPE)
    assert peer.stdout is not None
    try:
        address = (await peer.stdout.readline()).decode().strip()
        async with open_channel(address) as channel, asyncio.timeout(PATIENCE_S):
            call: Echo = channel.stream_stream("/fastserve.v1.Stage/Control")()
            await echoed(call)
            peer.send_signal(signal.SIGSTOP)
            with pytest.raises(grpc.aio.AioRpcError, match=PING_TIMEOUT) as error:
                await call.read()
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        peer.kill()
        await peer.wait()


async def echoed(call: Echo) -> None:
    await call.write(b"hello")
    assert await call.read() == b"hello"
