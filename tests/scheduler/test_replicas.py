"""Several pipelines behind one scheduler: shared out, summed up, and each others' spare."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.exposition import generate_latest

from fastserve.v1 import admin_pb2 as pb
from fastserve.v1 import admin_pb2_grpc, sampling_pb2
from fastserve_common.channels import open_channel
from fastserve_scheduler.metrics import ReplicaCollector

from .rig import Cluster, TestGateway, until, until_async
from .stages import StageRig, oracle
from .test_admin import update

PROMPT = [41, 42, 43]


@contextlib.asynccontextmanager
async def two_replicas(folder: Path, *flags: str, num_stages: int = 1) -> AsyncIterator[tuple[Cluster, StageRig]]:
    """The cluster, whose rig is replica 0, and the rig of replica 1."""
    cluster = Cluster(folder, num_stages, flags=["--num-replicas", "2", "--replica-patience", "0.05", *flags])
    other = StageRig(cluster.store, num_stages, replica=1)
    await other.start_all()
    async with cluster, contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(other.close)
        yield cluster, other


async def both_serve(cluster: Cluster) -> None:
    async def ready() -> bool:
        replicas = (await cluster.state()).replicas
        return len(replicas) == 2 and all(replica.device_blocks_total for replica in replicas)

    await until_async(ready)


def hold(*rigs: StageRig) -> None:
    for rig in rigs:
        for script in rig.scripts:
            script.gate.clear()


def release(*rigs: StageRig) -> None:
    for rig in rigs:
        for script in rig.scripts:
            script.gate.set()


async def test_requests_are_shared_out_by_waiting_work(tmp_path: Path) -> None:
    async with two_replicas(tmp_path) as (cluster, other):
        gateway = await cluster.gateway()
        await both_serve(cluster)
        hold(cluster.rig, other)
        answers = [await gateway.submit([n, *PROMPT], 40) for n in range(12)]
        await until_async(cluster.has_accepted(12))
        state = await cluster.state()
        assert [replica.running + replica.waiting for replica in state.replicas] == [6, 6]
        assert state.running + state.waiting == 12
        release(cluster.rig, other)
        for n, answer in enumerate(answers):
            assert (await answer.done()).ids == oracle([n, *PROMPT], 40)
        state = await cluster.state()
        assert [replica.tokens_generated for replica in state.replicas] == [240, 240]
        assert state.tokens_generated == 480
        # Twice the tokens in the iterations of one: each replica made half of them by itself.
        assert max(replica.iterations for replica in state.replicas) <= 240
        assert [stage.replica for stage in state.stages] == [0, 1]


async def test_one_replica_serves_while_the_other_is_not_there(tmp_path: Path) -> None:
    async with two_replicas(tmp_path) as (cluster, other):
        gateway = await cluster.gateway()
        await both_serve(cluster)
        await other.kill(0)
        for n in range(4):
            assert (await gateway.ask([n, *PROMPT], 20)).ids == oracle([n, *PROMPT], 20)
        assert gateway.statuses[-1].ready
        await cluster.rig.kill(0)
        await until(lambda: not gateway.statuses[-1].ready)
        assert "replica 1" in gateway.statuses[-1].detail or "waiting for stage 0" in gateway.statuses[-1].detail
        await other.start(0)
        await until(lambda: gateway.statuses[-1].ready)
        assert (await gateway.ask(PROMPT, 20)).ids == oracle(PROMPT, 20)
        await cluster.rig.start(0)


@pytest.mark.parametrize("victim", [0, 1])
async def test_a_lost_replicas_requests_go_on_elsewhere(tmp_path: Path, victim: int) -> None:
    async with two_replicas(tmp_path, num_stages=2) as (cluster, other):
        gateway = await cluster.gateway()
        await both_serve(cluster)
        answers = []
        for n in range(8):
            sampling = sampling_pb2.SamplingParams(temperature=1, top_p=1, seed=n, repetition_penalty=1)
            answers.append(await gateway.submit([n, *PROMPT], 80, sampling=sampling))
        await until(lambda: all(len(answer.ids) >= 5 for answer in answers))
        lost = (cluster.rig, other)[victim]
        await lost.kill(1)
        for n, answer in enumerate(answers):
            assert (await answer.done()).ids == oracle([n, *PROMPT], 80, seed=n)
            assert answer.reason == "LENGTH"
        await lost.start(1)
        await both_serve(cluster)


async def test_a_full_replica_takes_handed_over_requests_when_it_can(tmp_path: Path) -> None:
    """They were accepted once: a full queue makes them wait, not fail."""
    async with two_replicas(tmp_path, "--max-num-queued-reqs", "2", "--max-num-seqs", "1") as (cluster, other):
        gateway = await cluster.gateway()
        await both_serve(cluster)
        hold(cluster.rig, other)
        answers = [await gateway.submit([n, *PROMPT], 10) for n in range(6)]
        await until_async(cluster.has_accepted(6))
        await other.kill(0)
        await until_async(lambda: _all_on_the_first(cluster))
        release(cluster.rig)
        for n, answer in enumerate(answers):
            assert (await answer.done()).ids == oracle([n, *PROMPT], 10)


async def _all_on_the_first(cluster: Cluster) -> bool:
    replicas = (await cluster.state()).replicas
    return replicas[1].running + replicas[1].waiting == 0


async def test_what_is_handed_over_can_be_cancelled_and_taken_up_by_its_gateway(tmp_path: Path) -> None:
    async with two_replicas(tmp_path, "--reattach-grace", "1000") as (cluster, other):
        gateway = await cluster.gateway()
        await both_serve(cluster)
        answers = [await gateway.submit([n, *PROMPT], 100, request_id=f"r{n}") for n in range(4)]
        await until(lambda: all(len(answer.ids) >= 3 for answer in answers))
        hold(cluster.rig)
        await other.kill(0)
        await until_async(lambda: _all_on_the_first(cluster))
        await gateway.cancel("r0")
        await gateway.cancel("r1")
        had = {n: list(answers[n].ids) for n in (2, 3)}
        release(cluster.rig)
        assert {(await answers[n].done()).reason for n in (0, 1)} == {"CANCELLED"}
        await gateway.close()
        back = await cluster.gateway()
        for n in (2, 3):
            answer = await back.ask([n, *PROMPT], 100, request_id=f"r{n}", delivered=had[n])
            assert answer.ids == oracle([n, *PROMPT], 100)


async def test_two_gateways_share_the_limits_of_one_scheduler(tmp_path: Path) -> None:
    flags = ("--max-num-queued-reqs", "2", "--max-num-seqs", "1")
    async with Cluster(tmp_path, flags=flags) as cluster:
        one, two = await cluster.gateway("one"), await cluster.gateway("two")
        hold(cluster.rig)
        accepted = [await gateway.submit([n, *PROMPT], 5) for n, gateway in enumerate((one, two, one))]
        await until_async(cluster.has_accepted(3))
        for gateway in (one, two):
            assert (await gateway.ask(PROMPT, 5)).refusal == "QUEUE_FULL_REQUESTS"
        release(cluster.rig)
        for n, answer in enumerate(accepted):
            assert (await answer.done()).ids == oracle([n, *PROMPT], 5)


async def test_operators_speak_to_all_replicas_at_once(tmp_path: Path) -> None:
    async with two_replicas(tmp_path) as (cluster, other):
        gateway = await cluster.gateway()
        await both_serve(cluster)
        hold(cluster.rig, other)
        answers = [await gateway.submit([n, *PROMPT], 10, request_id=f"r{n}") for n in range(4)]
        await until_async(cluster.has_accepted(4))
        assert (await update(cluster, policy="fcfs", max_num_seqs=1)).config.policy == "fcfs"
        assert [replica.policy for replica in (await cluster.state()).replicas] == ["fcfs", "fcfs"]
        await _look_into(cluster, gateway)
        release(cluster.rig, other)
        for answer in answers:
            await answer.done()


async def _look_into(cluster: Cluster, gateway: TestGateway) -> None:
    async with open_channel(cluster.address) as channel:
        stub = admin_pb2_grpc.AdminStub(channel)
        listed = await stub.ListJobs(pb.ListJobsRequest())
        assert sorted(job.replica for job in listed.jobs) == [0, 0, 1, 1]
        assert len({job.job_id for job in listed.jobs}) == 4
        for job in listed.jobs:
            story = await stub.GetJobStory(pb.GetJobStoryRequest(job_id=job.job_id))
            assert story.moments[0].happening.startswith("arrived")
        drained = await stub.Drain(pb.DrainRequest())
        assert drained.live == 4
        await until(lambda: not gateway.statuses[-1].ready)
        assert (await gateway.ask(PROMPT, 5)).refusal == "DRAINING"
        await stub.Resume(pb.ResumeRequest())
        await until(lambda: gateway.statuses[-1].ready)


def test_metrics_of_replicas_are_one_family_each() -> None:
    registries = []
    for replica in range(2):
        registry = CollectorRegistry()
        Counter("fastserve:things", "Things", ["kind"], registry=registry).labels("a").inc(replica + 1)
        registries.append(registry)
    whole = CollectorRegistry()
    whole.register(ReplicaCollector(registries))
    text = generate_latest(whole).decode()
    assert text.count("# TYPE fastserve:things_total counter") == 1
    assert 'fastserve:things_total{kind="a",replica="0"} 1.0' in text
    assert 'fastserve:things_total{kind="a",replica="1"} 2.0' in text
