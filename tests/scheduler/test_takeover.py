"""Gateways that reconnect, schedulers that follow one another, the orderly start and end."""

import asyncio
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2

from fastserve.v1 import sampling_pb2, scheduler_pb2_grpc
from fastserve_common.channels import open_channel
from fastserve_common.settings import SettingsError
from fastserve_scheduler import codec, leadership, service
from fastserve_scheduler.gateway_link import GatewayLink

from .rig import Cluster, SchedulerProcess, TestGateway, until, until_async
from .stages import oracle

PROMPT = [21, 22, 23]
FOR_EVER = ("--reattach-grace", "1000")


async def _is_serving(address: str) -> bool:
    async with open_channel(address) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        answer = await check(health_pb2.HealthCheckRequest(service=codec.SCHEDULER_SERVICE))
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@pytest.mark.parametrize("lost", [0, 3])
async def test_a_gateway_that_comes_back_gets_the_rest(tmp_path: Path, lost: int) -> None:
    """`lost`: tokens that were sent on the old stream and never reached the client."""
    async with Cluster(tmp_path, 2, flags=FOR_EVER) as cluster:
        old = await cluster.gateway()
        before = await old.submit(PROMPT, 50, request_id="r")
        await until(lambda: len(before.ids) >= 10)
        await old.close()
        delivered = before.ids[: len(before.ids) - lost]
        new = await cluster.gateway()
        after = await new.ask(PROMPT, 50, request_id="r", delivered=delivered)
        assert after.ids == oracle(PROMPT, 50)
        assert after.reason == "LENGTH"
        assert (await cluster.state()).tokens_generated == 50, "nothing was computed again"


async def test_a_gateway_may_be_back_before_its_old_stream_is_known_to_be_broken(tmp_path: Path) -> None:
    async with Cluster(tmp_path, flags=FOR_EVER) as cluster:
        old = await cluster.gateway("gw")
        before = await old.submit(PROMPT, 60, request_id="r")
        await until(lambda: len(before.ids) >= 5)
        new = await cluster.gateway("gw")
        after = await new.ask(PROMPT, 60, request_id="r", delivered=before.ids[:5])
        assert after.ids == oracle(PROMPT, 60)
        assert before.finished is None


async def test_what_nobody_comes_back_for_ends_after_the_grace_period(tmp_path: Path) -> None:
    async with Cluster(tmp_path, flags=["--reattach-grace", "0.05"]) as cluster:
        gateway = await cluster.gateway()
        cluster.rig.scripts[0].gate.clear()
        await gateway.submit(PROMPT, 400)
        await until(lambda: bool(cluster.rig.scripts[0].plans))
        await gateway.close()
        cluster.rig.scripts[0].gate.set()
        await until_async(cluster.ledger_is_clean)


async def test_a_request_that_finished_meanwhile_is_finished_again_from_what_was_delivered(tmp_path: Path) -> None:
    async with Cluster(tmp_path, flags=FOR_EVER) as cluster:
        old = await cluster.gateway()
        before = await old.submit(PROMPT, 20, request_id="r")
        await until(lambda: len(before.ids) >= 5)
        await old.close()
        await until_async(cluster.ledger_is_clean)
        new = await cluster.gateway()
        assert (await new.ask(PROMPT, 20, request_id="r", delivered=before.ids)).ids == oracle(PROMPT, 20)


async def _resubmit(old: TestGateway, new: TestGateway, num_tokens: int, requests: dict[str, int]) -> None:
    for request_id, seed in requests.items():
        answer = await new.ask(
            [seed, *PROMPT],
            num_tokens,
            request_id=request_id,
            delivered=old.answers[request_id].ids,
            sampling=sampling_pb2.SamplingParams(temperature=1, top_p=1, seed=seed, repetition_penalty=1),
        )
        assert answer.ids == oracle([seed, *PROMPT], num_tokens, seed=seed)


@pytest.mark.parametrize("way", ["crash", "lease lost", "drain"])
async def test_a_standby_takes_over_with_what_was_delivered(tmp_path: Path, way: str) -> None:
    async with Cluster(tmp_path, 2, flags=["--drain-timeout", "0"]) as cluster:
        old = await cluster.gateway()
        standby = await _standby(cluster)
        requests = {f"r{seed}": seed for seed in range(4)}
        for request_id, seed in requests.items():
            sampling = sampling_pb2.SamplingParams(temperature=1, top_p=1, seed=seed, repetition_penalty=1)
            await old.submit([seed, *PROMPT], 60, request_id=request_id, sampling=sampling)
        await until(lambda: all(len(answer.ids) >= 5 for answer in old.answers.values()))
        first = cluster.schedulers[0]
        if way == "crash":
            await first.crash()
        elif way == "drain":
            assert await first.end() == 0
        else:
            await cluster.store.release(leadership.LEASE, await _lease_owner(cluster))
            assert await asyncio.wait_for(first.task, 10) == 1
        await cluster.find_scheduler(standby)
        await until(lambda: old.closed)
        new = await cluster.gateway(ready=False)
        await _resubmit(old, new, 60, requests)
        assert new.hellos[-1].generation > old.hellos[-1].generation


async def _standby(cluster: Cluster) -> SchedulerProcess:
    standby = SchedulerProcess(cluster.settings())
    cluster.schedulers.append(standby)
    return standby


async def _lease_owner(cluster: Cluster) -> str:
    return (await cluster.store.members("scheduler"))["leader"]["incarnation"]


async def test_requests_that_come_before_the_stages_wait_for_them(tmp_path: Path) -> None:
    async with Cluster(tmp_path, 2) as cluster:
        await cluster.schedulers[0].end()
        await cluster.rig.kill(1)
        await cluster.start_scheduler()
        gateway = await cluster.gateway(ready=False)
        done = oracle(PROMPT, 12)
        complete = await gateway.submit(PROMPT, 12, delivered=done)
        answer = await gateway.submit(PROMPT, 12, delivered=done[:4])
        given_up = await gateway.submit(PROMPT, 12, request_id="given up")
        await gateway.cancel("given up")
        assert (await given_up.done()).reason == "CANCELLED"
        assert not await _is_serving(cluster.address)
        await cluster.rig.start(1)
        assert (await answer.done()).ids == oracle(PROMPT, 12)
        assert (await complete.done()).reason == "LENGTH"
        assert await _is_serving(cluster.address)


async def test_requests_do_not_wait_for_stages_for_ever(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        await cluster.schedulers[0].end()
        await cluster.rig.kill(0)
        await cluster.start_scheduler("--startup-hold", "0.05", "--max-num-queued-reqs", "1")
        gateway = await cluster.gateway(ready=False)
        held, too_many = await gateway.submit(PROMPT, 5), await gateway.submit(PROMPT, 5)
        assert (await too_many.done()).refusal == "QUEUE_FULL_REQUESTS"
        assert (await held.done()).refusal == "NOT_READY"
        assert held.rejected is not None
        assert held.rejected.retry_after_ms > 0
        assert "stage 0" in held.rejected.message
        await cluster.schedulers[-1].crash()


async def test_an_answer_that_was_complete_is_not_continued(tmp_path: Path) -> None:
    expected = oracle(PROMPT, 10)
    async with Cluster(tmp_path) as cluster:
        gateway = await cluster.gateway()
        answer = await gateway.ask(PROMPT, 10, delivered=expected[:4], stop=[expected[3]])
        assert answer.reason == "STOP_TOKEN"
        assert answer.finished is not None
        assert answer.finished.stop_token_id == expected[3]
        assert (await cluster.state()).iterations == 0


async def test_sigterm_refuses_new_requests_and_finishes_the_others(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        gateway = await cluster.gateway()
        script = cluster.rig.scripts[0]
        script.gate.clear()
        running = await gateway.submit(PROMPT, 30)
        await until(lambda: bool(script.plans))
        cluster.schedulers[0].stop.set()
        await until(lambda: "going away" in gateway.statuses[-1].detail)
        assert not await _is_serving(cluster.address)
        assert (await gateway.ask(PROMPT, 5)).refusal == "DRAINING"
        script.gate.set()
        assert (await running.done()).ids == oracle(PROMPT, 30)
        assert await asyncio.wait_for(cluster.schedulers[0].task, 10) == 0
        assert await cluster.store.members("scheduler") == {}


async def test_what_does_not_finish_in_time_is_left_to_the_next_scheduler(tmp_path: Path) -> None:
    async with Cluster(tmp_path, flags=["--drain-timeout", "0.05"]) as cluster:
        gateway = await cluster.gateway()
        script = cluster.rig.scripts[0]
        script.gate.clear()
        running = await gateway.submit(PROMPT, 30)
        await until(lambda: bool(script.plans))
        waiting = await gateway.submit(PROMPT, 30)
        await until_async(cluster.has_accepted(2))  # else the drain may come first, and refuses
        cluster.schedulers[0].stop.set()
        assert await asyncio.wait_for(cluster.schedulers[0].task, 10) == 0
        await until(lambda: gateway.closed)
        assert [answer.finished or answer.rejected for answer in (running, waiting)] == [None, None]
        script.gate.set()
        await cluster.start_scheduler()
        after = await cluster.gateway()
        for answer in (running, waiting):
            assert (await after.ask(PROMPT, 30, delivered=answer.ids)).ids == oracle(PROMPT, 30)


async def test_a_standby_has_nothing_to_say_and_ends_at_once(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        await cluster.gateway()
        standby = await _standby(cluster)
        assert await standby.end() == 0


async def test_settings_that_the_stages_cannot_serve_end_the_scheduler_with_a_sentence(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        await cluster.schedulers[0].end()
        with pytest.raises(SettingsError, match=r"--max-model-len: the stages serve at most 512"):
            await asyncio.wait_for(SchedulerProcess(cluster.settings("--max-model-len", "513")).task, 10)


async def test_a_stream_must_begin_with_a_hello(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster, open_channel(cluster.address) as channel:
        call = scheduler_pb2_grpc.SchedulerStub(channel).Connect()
        await call.done_writing()
        assert (await call.code()).name == "INVALID_ARGUMENT"
        assert "GatewayHello" in await call.details()


async def test_a_gateway_that_does_not_read_loses_its_stream_and_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links: list[GatewayLink] = []

    def make(gateway_id: str, *, batches: bool) -> GatewayLink:
        links.append(GatewayLink(gateway_id, batches=batches, limit=3 if gateway_id == "slow" else 1000))
        return links[-1]

    monkeypatch.setattr(service, "GatewayLink", make)
    async with Cluster(tmp_path, flags=["--reattach-grace", "0"]) as cluster:
        good, slow = await cluster.gateway("good"), await cluster.gateway("slow")
        for n in range(8):  # one iteration says eight things at once
            await slow.submit([n], 100)
        answer = await good.ask(PROMPT, 30)
        assert answer.ids == oracle(PROMPT, 30)
        await until(lambda: slow.closed)
