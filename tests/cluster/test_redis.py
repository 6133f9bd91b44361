"""A cluster of real processes on a real Redis: it dies and comes back empty, then the leading scheduler is killed."""

import asyncio
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.stores.conftest import own_redis
from tests.stores.redis_process import RedisProcess

from fastserve import AsyncClient, RetryPolicy
from fastserve.cli.settings import ServeSettings
from fastserve_common.state import LEASE_TTL_S
from fastserve_worker.fake_stage import fake_answer

from .redis_cluster import PATIENCE_S, Facts, RedisCluster, Stream, facts_of

pytestmark = pytest.mark.cluster

__all__ = ["own_redis"]

#: Three times as long as a lease.
OUTAGE_S = 10.0
assert OUTAGE_S > 3 * LEASE_TTL_S


@pytest.fixture
def cluster(tmp_path: Path, own_redis: RedisProcess, words: Path, profiles: Path) -> Iterator[RedisCluster]:
    settings = ServeSettings(
        model=str(words),
        fake=True,
        fake_iteration_ms=20,
        host_kv_memory=8 << 20,
        kv_memory=64 << 20,
        profile_dir=profiles,
        served_model_name=("words",),
    )
    cluster = RedisCluster(tmp_path, words, settings, own_redis.url)
    yield cluster
    cluster.destroy()


async def ask(client: AsyncClient, prompt: list[int]) -> None:
    answer = await client.generate(prompt, max_tokens=4, temperature=0, ignore_eos=True)
    assert list(answer.answers[0].token_ids) == fake_answer(prompt, 4)


async def settled(cluster: RedisCluster, facts: Facts, before: dict[str, str] | None = None) -> dict[str, str]:
    """Who leads when everybody is registered, and whoever led `before` leads still or has ended."""
    while True:
        leader = await facts.leader_of_all()
        leads = leader is not None and cluster.is_running(leader) and await facts.holds_the_lease(leader)
        if leader is not None and leads and (before in (None, leader) or not cluster.is_running(before)):
            return leader
        await asyncio.sleep(0.02)


async def test_redis_dies_and_then_the_leader(cluster: RedisCluster, own_redis: RedisProcess) -> None:
    async with facts_of(own_redis.url) as facts:
        try:
            async with asyncio.timeout(PATIENCE_S):
                await through_it_all(cluster, facts, own_redis)
        except TimeoutError:
            raise AssertionError(cluster.said()) from None
    cluster.stop()


async def through_it_all(cluster: RedisCluster, facts: Facts, own_redis: RedisProcess) -> None:
    first, others = await settled(cluster, facts), await facts.of_the_others()
    async with AsyncClient(await facts.gateway(), retry=RetryPolicy(max_attempts=20)) as client:
        stream = Stream(client, [50, 51, 52])
        await stream.goes_on()
        own_redis.kill()
        back_s = time.monotonic() + OUTAGE_S
        while time.monotonic() < back_s:
            await stream.goes_on()
            await ask(client, [60, 61])
        own_redis.start()
        second = await settled(cluster, facts, first)
        await stream.goes_on()
        await ask(client, [70, 71])
        await stream.end()
        assert await facts.of_the_others() == others, "everybody has written the same facts again"
        if second != first:  # whoever asked first leads; the other one ended, to be started again
            assert cluster.schedulers[first["address"]].returncode == 1
            assert int(second["generation"]) > int(first["generation"])
        cluster.restart_ended_schedulers()

        stream = Stream(client, [80, 81, 82])
        await stream.goes_on()
        cluster.schedulers[second["address"]].send_signal(signal.SIGKILL)
        cluster.schedulers[second["address"]].wait()
        third = await settled(cluster, facts, second)
        await stream.goes_on()
        await ask(client, [90, 91])
        await stream.end()
        assert int(third["generation"]) > int(second["generation"])
        assert third["address"] != second["address"]
