"""Redis goes away, freezes or forgets everything while streams run: no stream notices, and all facts come back."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from tests.scheduler.rig import Cluster, SchedulerProcess, TestGateway, until, until_async
from tests.scheduler.stages import oracle

from fastserve_common.state import LEASE_TTL_S, StateError, open_state
from fastserve_scheduler.leadership import LEASE

from .redis_process import RedisProcess

#: Longer than any lease lives.
OUTAGE_S = 1.2 * LEASE_TTL_S


class Traffic:
    """One stream after another, each compared with what it must be."""

    def __init__(self, gateway: TestGateway) -> None:
        self.num_right = 0
        #: No stream begins from now on. Not a cancel: a write that is cancelled takes the gateway's stream with it.
        self.over = False
        self._gateway = gateway

    async def run(self) -> None:
        while not self.over:
            prompt = [self.num_right % 900, 1, 2]
            answer = await self._gateway.ask(prompt, 30)
            assert answer.ids == oracle(prompt, 30)
            self.num_right += 1

    async def goes_on(self) -> None:
        """A stream that begins after now ends right."""
        seen = self.num_right
        await until(lambda: self.num_right > seen + 1)


@contextlib.asynccontextmanager
async def traffic(gateway: TestGateway) -> AsyncIterator[Traffic]:
    """A stream that does not end right ends the block with its error."""
    running = Traffic(gateway)
    async with asyncio.TaskGroup() as group:
        group.create_task(running.run())
        yield running
        running.over = True


async def outage(running: Traffic) -> None:
    """As long as a lease and longer, with streams all the while."""
    end_s = time.monotonic() + OUTAGE_S
    while time.monotonic() < end_s:
        await running.goes_on()


def facts_are_back(cluster: Cluster) -> Callable[[], Awaitable[bool]]:
    async def look() -> bool:
        try:
            stages, leaders = await cluster.store.members("stage"), await cluster.store.members("scheduler")
            return list(stages) == ["stage-0", "stage-1"] and list(leaders) == ["leader"]
        except StateError:
            return False

    return look


async def leader_of(cluster: Cluster) -> dict[str, str]:
    return (await cluster.store.members("scheduler"))["leader"]


def leadership_is_settled(cluster: Cluster) -> Callable[[], Awaitable[bool]]:
    """Who is registered holds the lease too: for a moment two may have thought that they lead."""

    async def look() -> bool:
        leader = (await cluster.store.members("scheduler")).get("leader")
        return leader is not None and await cluster.store.acquire(LEASE, leader["incarnation"])

    return look


async def test_a_redis_that_forgets_everything_is_told_everything_again(
    tmp_path: Path, own_redis: RedisProcess
) -> None:
    async with Cluster(tmp_path, 2, state=own_redis.url) as cluster:
        before = await leader_of(cluster)
        async with traffic(await cluster.gateway()) as running:
            await running.goes_on()
            own_redis.wipe()
            await running.goes_on()
            await until_async(facts_are_back(cluster))
            await running.goes_on()
        assert await leader_of(cluster) == before
        assert not await cluster.store.acquire("scheduler", "somebody else"), "the lease is held again"


@pytest.mark.cluster
async def test_a_redis_that_dies_and_comes_back_empty_costs_no_token(tmp_path: Path, own_redis: RedisProcess) -> None:
    async with Cluster(tmp_path, 2, state=own_redis.url) as cluster:
        before = await leader_of(cluster)
        async with traffic(await cluster.gateway()) as running:
            own_redis.kill()
            await outage(running)
            own_redis.start()
            await until_async(facts_are_back(cluster))
            await running.goes_on()
        assert await leader_of(cluster) == before
        assert (await cluster.state()).stages[1].up


@pytest.mark.cluster
async def test_a_stage_that_dies_while_redis_is_away_is_back_when_both_are(
    tmp_path: Path, own_redis: RedisProcess
) -> None:
    async with Cluster(tmp_path, 2, state=own_redis.url) as cluster:
        gateway = await cluster.gateway()
        cluster.rig.scripts[1].gate.clear()
        answer = await gateway.submit([5, 6], 30)
        await until(lambda: bool(cluster.rig.scripts[0].plans))
        own_redis.kill()
        await cluster.rig.kill(1)
        await until(lambda: not gateway.statuses[-1].ready)
        assert "waiting for stage 1 of 2" in gateway.statuses[-1].detail
        own_redis.start()
        cluster.rig.scripts[1].gate.set()
        await cluster.rig.start(1)
        assert (await answer.done()).ids == oracle([5, 6], 30)


@pytest.mark.cluster
async def test_a_frozen_redis_may_change_the_leader_but_no_token(tmp_path: Path, own_redis: RedisProcess) -> None:
    """When it thaws every lease has expired: whoever asks first leads, and leads with a higher epoch."""
    async with Cluster(tmp_path, 2, state=own_redis.url) as cluster:
        standby = SchedulerProcess(cluster.settings())
        cluster.schedulers.append(standby)
        before = await leader_of(cluster)
        gateway = await cluster.gateway()
        async with traffic(gateway) as running:
            await running.goes_on()
            own_redis.freeze()
            await outage(running)
        long_one = await gateway.submit([7, 8, 9], 200, request_id="over the change")
        await until(lambda: len(long_one.ids) >= 3)
        own_redis.thaw()
        await until_async(facts_are_back(cluster))
        await until_async(leadership_is_settled(cluster))
        after = await leader_of(cluster)
        assert int(after["generation"]) >= int(before["generation"])
        if after != before:
            assert await asyncio.wait_for(cluster.schedulers[0].task, 30) == 1
        cluster.address = after["address"]
        second = await cluster.gateway()
        answer = await second.ask([7, 8, 9], 200, request_id="over the change", delivered=long_one.ids)
        assert answer.ids == oracle([7, 8, 9], 200)
        await standby.end()


async def test_what_is_missing_is_said_in_words(tmp_path: Path, redis_url: str) -> None:
    async with Cluster(tmp_path, 2, state=redis_url) as cluster:
        gateway = await cluster.gateway()
        await cluster.rig.kill(1)
        await until(lambda: gateway.statuses[-1].detail == "waiting for stage 1 of 2: no such member")
        await cluster.rig.kill(0)
        await until(lambda: gateway.statuses[-1].detail == "waiting for stage 0 of 2: no such member")
        await cluster.rig.start_all()
        await until(lambda: gateway.statuses[-1].ready)


async def test_calls_to_a_dead_redis_fail_at_once(own_redis: RedisProcess) -> None:
    """Whoever asks must be free again to look after its streams: nothing is tried twice behind its back."""
    store = open_state(own_redis.url)
    await store.members("stage")
    own_redis.kill()
    for _ in range(20):  # a client that backed off would need minutes for these
        with pytest.raises(StateError):
            await store.members("stage")
    await store.close()
