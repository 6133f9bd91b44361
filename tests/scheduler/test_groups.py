"""Two groups in one state store: each has a leader, standbys and stages of its own, and knows nothing of the other."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fastserve.v1 import scheduler_pb2
from fastserve_common.settings import SettingsError
from fastserve_scheduler.leadership import ROLE

from .rig import Cluster, SchedulerProcess, TestGateway, until
from .stages import oracle
from .test_overrides import say

PROMPT = [41, 42, 43]


@contextlib.asynccontextmanager
async def two_groups(folder: Path, *flags: str) -> AsyncIterator[tuple[Cluster, Cluster]]:
    async with (
        Cluster(folder, 2, flags=flags) as first,
        Cluster(folder, 2, flags=flags, state=first.url, group="b") as second,
    ):
        yield first, second


async def test_each_has_a_leader_and_stages_of_its_own(tmp_path: Path) -> None:
    async with two_groups(tmp_path) as (first, second):
        assert first.address != second.address
        gateways = [await cluster.gateway() for cluster in (first, second)]
        for gateway in gateways:
            assert (await gateway.ask(PROMPT, 20)).ids == oracle(PROMPT, 20)
        for cluster in (first, second):
            assert (await cluster.state()).tokens_generated == 20
        await second.rig.kill(1)
        await until(lambda: gateways[1].statuses[-1].detail == "waiting for stage 1 of 2: no such member")
        assert (await gateways[0].ask(PROMPT, 5)).ids == oracle(PROMPT, 5)
        await second.rig.start(1)
        await until(lambda: gateways[1].statuses[-1].ready)


async def test_a_standby_takes_over_its_own_group(tmp_path: Path) -> None:
    async with two_groups(tmp_path) as (first, second):
        old = await second.gateway()
        standby = SchedulerProcess(second.settings())
        second.schedulers.append(standby)
        await say(first, "set", "max_num_seqs=3")
        await say(second, "set", "max_num_seqs=5")
        address = first.address
        await second.schedulers[0].crash()
        await second.find_scheduler(standby)
        new = await second.gateway()
        assert new.hellos[-1].generation > old.hellos[-1].generation
        assert "max_num_seqs=5" in await say(second, "get"), "what operators change is the group's"
        assert (await first.store.members(ROLE))["leader"]["address"] == address
        assert "max_num_seqs=3" in await say(first, "get")


@pytest.mark.parametrize("name", ["", "a@b", "ä", "x" * 64])
async def test_a_group_has_a_plain_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--group"):
        Cluster(tmp_path, group=name).settings()


async def loads_until(gateway: TestGateway, wanted: scheduler_pb2.Load) -> None:
    await until(lambda: bool(gateway.loads) and gateway.loads[-1] == wanted)


@pytest.mark.parametrize("replicas", [1, 2])
async def test_gateways_hear_what_there_is_to_do(tmp_path: Path, replicas: int) -> None:
    async with Cluster(tmp_path, flags=["--max-num-seqs", "1", "--num-replicas", str(replicas)]) as cluster:
        first = await cluster.gateway("first")
        load = scheduler_pb2.Load(pipelines=1, model_fingerprint="tiny")
        await until(lambda: bool(first.loads) and first.loads[-1].pipelines == 1)
        load.model_fingerprint = first.loads[-1].model_fingerprint
        assert load.model_fingerprint
        await loads_until(first, load)
        script = cluster.rig.scripts[0]
        script.gate.clear()
        answers = [await first.submit(PROMPT, 3) for _ in range(3)]
        busy = scheduler_pb2.Load(
            waiting_prompt_tokens=2 * len(PROMPT), live=3, pipelines=1, accepted=3,
            model_fingerprint=load.model_fingerprint,
        )  # fmt: skip
        await loads_until(first, busy)
        second = await cluster.gateway("second")
        await loads_until(second, busy)
        script.gate.set()
        for answer in answers:
            assert (await answer.done()).ids == oracle(PROMPT, 3)
        load.accepted = 3
        await loads_until(second, load)
