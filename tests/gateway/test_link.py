"""The scheduler goes away and comes back: no client notices more than a pause."""

import asyncio
from pathlib import Path

import grpc
import grpc.aio
import pytest

from fastserve.v1 import inference_pb2, scheduler_pb2
from fastserve_gateway import codec

from .fake_scheduler import FakeScheduler, Script
from .models import END, ids_of
from .rig import rig, until

ANSWER = "hello \u4f60\u597d, this goes on"


async def test_streams_survive_a_new_scheduler(tmp_path: Path) -> None:
    """Killed in mid-character; whole and streamed, HTTP and gRPC; text equal to an undisturbed run."""
    gates = [asyncio.Semaphore(8) for _ in range(3)]
    scripts = {str(k): Script(ids=[*ids_of(ANSWER), END], gate=gate) for k, gate in enumerate(gates)}
    async with rig(tmp_path, lambda submit: scripts[submit.request_id]) as r:
        stream = asyncio.create_task(r.stream(prompt="x", max_tokens=99, request_id="0"))
        whole = asyncio.create_task(r.complete(max_tokens=99, request_id="1"))
        request = inference_pb2.GenerateRequest(text="x", request_id="2")
        rpc = asyncio.create_task(_unary(r.stub, request))
        await until(lambda: len(r.fake.jobs) == 3 and all(job.sent == 8 for job in r.fake.jobs))
        await until(lambda: r.metric("generation_tokens_total") == 24)
        await r.fake.stop()
        await until(lambda: r.gateway.engine.not_ready() is not None)
        ready = await r.http.get("/health/ready")
        assert ready.status_code == 503
        assert (await r.complete()).status_code == 503
        for gate in gates:
            for _ in range(100):
                gate.release()
        await r.fake.start(r.store)
        events = await stream
        assert "".join(event["choices"][0]["text"] for event in events) == ANSWER
        answer = (await whole).json()
        assert answer["choices"][0]["text"] == ANSWER
        assert answer["usage"]["completion_tokens"] == len(ids_of(ANSWER)) + 1
        assert (await rpc).outputs[0].text == ANSWER
        again = r.fake.jobs[3:]
        assert sorted(job.submit.request_id for job in again) == ["0", "1", "2"]
        assert all(job.delivered == ids_of(ANSWER)[:8] for job in again)
        first = {job.submit.request_id: job.submit for job in r.fake.jobs[:3]}
        for job in again:
            assert job.submit.sampling == first[job.submit.request_id].sampling, "seed included"
        await r.quiet()
        assert r.outcomes() == {"stop": 3}


async def _unary(stub: object, request: inference_pb2.GenerateRequest) -> inference_pb2.GenerateResponse:
    response: inference_pb2.GenerateResponse = await stub.Generate(request)  # type: ignore[attr-defined]
    return response


@pytest.mark.parametrize(("last", "max_tokens", "reason"), [(END, 9, "stop"), (99, 3, "length")])
async def test_end_is_known_when_only_the_last_word_was_lost(
    tmp_path: Path, last: int, max_tokens: int, reason: str
) -> None:
    """All tokens arrived, the scheduler died before it said `finished`: nothing is submitted again."""

    class Mute(FakeScheduler):
        def _finish(self, *args: object, **kwargs: object) -> None:
            return None

    async with rig(tmp_path, Script(ids=[97, 98, last], finish=None)) as r:
        r.fake.__class__ = Mute
        task = asyncio.create_task(r.complete(max_tokens=max_tokens))
        await until(lambda: r.metric("generation_tokens_total") == 3)
        r.fake.__class__ = FakeScheduler
        await r.fake.stop()
        await r.fake.start(r.store)
        answer = (await task).json()
        assert answer["choices"][0]["finish_reason"] == reason
        assert len(r.fake.jobs) == 1


async def test_scheduler_without_stages_yet_is_waited_for(tmp_path: Path) -> None:
    gate = asyncio.Semaphore(2)
    refusals = 3
    normal = Script(ids=[*b"abcd"], gate=gate)

    def script(submit: scheduler_pb2.SubmitRequest) -> Script:
        nonlocal refusals
        if submit.delivered_token_ids and refusals:
            refusals -= 1
            return Script(reject=scheduler_pb2.REJECT_REASON_NOT_READY)
        return normal

    async with rig(tmp_path, script) as r:
        task = asyncio.create_task(r.complete(max_tokens=4))
        await until(lambda: bool(r.fake.jobs) and r.fake.jobs[0].sent == 2)
        await until(lambda: r.metric("generation_tokens_total") == 2)
        await r.fake.stop()
        for _ in range(2):
            gate.release()
        await r.fake.start(r.store)
        assert (await task).json()["choices"][0]["text"] == "abcd"
        assert refusals == 0
        await r.quiet()


async def test_nobody_comes_back(tmp_path: Path) -> None:
    def script(submit: scheduler_pb2.SubmitRequest) -> Script:
        return Script(ids=[97], endless=True, gate=asyncio.Semaphore(1))

    async with rig(tmp_path, script, reconnect_timeout=0.2) as r:
        whole = asyncio.create_task(r.complete(max_tokens=9))
        stream = asyncio.create_task(r.stream(prompt="x", max_tokens=9))
        rpc = r.stub.GenerateStream(inference_pb2.GenerateRequest(text="x"))
        assert (await rpc.read()).outputs[0].text == "a"
        await until(lambda: r.metric("generation_tokens_total") == 3)
        await r.fake.stop()
        response = await whole
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert (await stream)[-1]["error"]["code"] == "unavailable"
        assert await rpc.code() is grpc.StatusCode.UNAVAILABLE
        await until(lambda: not r.gateway.engine._sessions)
        assert r.outcomes() == {"error": 3}


async def test_frozen_scheduler_is_left_for_the_new_leader(tmp_path: Path) -> None:
    """Its connection stays open and silent; only the store knows that somebody else leads."""
    gate = asyncio.Semaphore(1)
    async with rig(tmp_path, Script(ids=[*b"ab"], gate=gate)) as r:
        task = asyncio.create_task(r.complete(max_tokens=2))
        await until(lambda: r.metric("generation_tokens_total") == 1)
        other = FakeScheduler(lambda _: Script(ids=[*b"ab"]), generation=1)
        await other.start(r.store)
        assert (await task).json()["choices"][0]["text"] == "ab"
        assert other.jobs[0].delivered == [97]
        assert other.hellos == r.fake.hellos, "the same gateway"
        await other.stop()


async def test_readiness_follows_the_cluster(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        assert (await r.http.get("/health")).status_code == 200
        r.fake.set_ready(False, "stage 1 is missing")
        await until(lambda: r.gateway.engine.not_ready() is not None)
        for path in ("/health", "/health/ready"):
            response = await r.http.get(path)
            assert response.status_code == 503
            assert "stage 1 is missing" in response.json()["error"]["message"]
        assert (await r.http.get("/health/live")).json() == {"status": "live"}
        r.fake.set_ready(True)
        await until(lambda: r.gateway.engine.not_ready() is None)
        assert (await r.http.get("/health/ready")).json() == {"status": "ready"}


async def test_messages_in_batches_are_taken_one_by_one(tmp_path: Path) -> None:
    """Tokens of several answers, ends and a refusal in one stream message."""
    gate = asyncio.Semaphore(0)

    def script(submit: scheduler_pb2.SubmitRequest) -> Script:
        if submit.request_id == "refused":
            return Script(reject=scheduler_pb2.REJECT_REASON_QUEUE_FULL_REQUESTS)
        return Script(ids=ids_of(ANSWER), gate=gate)

    async with rig(tmp_path, script) as r:
        answers = [asyncio.create_task(r.complete(max_tokens=len(ids_of(ANSWER)))) for _ in range(8)]
        await until(lambda: len(r.fake.jobs) == 8)
        refused = asyncio.create_task(r.complete(request_id="refused"))
        for _ in range(8 * len(ids_of(ANSWER))):
            gate.release()
        for answer in await asyncio.gather(*answers):
            choice = answer.json()["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == (ANSWER, "length")
        assert (await refused).status_code == 429
        assert r.fake.batched > 8
        await r.quiet()
        assert r.outcomes() == {"length": 8, "rejected": 1}


def test_a_batch_says_what_its_messages_say_in_order() -> None:
    tokens = scheduler_pb2.SchedulerMessage(tokens=scheduler_pb2.Tokens(request_id="a"))
    finished = scheduler_pb2.SchedulerMessage(finished=scheduler_pb2.Finished(request_id="b"))
    batch = scheduler_pb2.MessageBatch(messages=[tokens, finished])
    assert list(codec.parts_of(scheduler_pb2.SchedulerMessage(batch=batch))) == [tokens, finished]
    assert list(codec.parts_of(tokens)) == [tokens]
    assert codec.hello_to_wire("gw").hello.accepts_batches
