"""Several groups of schedulers serve one model: requests are spread over them, one that goes away is done without."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fastserve.v1 import scheduler_pb2
from fastserve_gateway.engine import groups, link

from .fake_scheduler import FakeScheduler, Script
from .models import ids_of
from .rig import Choose, Rig, rig, until

ANSWER = "hello, this goes on"
MODEL = "a-model"


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "LEADER_POLL_S", 0.02)


def load(waiting_tokens: int = 0, live: int = 0, pipelines: int = 1, model: str = MODEL) -> scheduler_pb2.Load:
    return scheduler_pb2.Load(
        waiting_prompt_tokens=waiting_tokens, live=live, pipelines=pipelines, model_fingerprint=model
    )


@contextlib.asynccontextmanager
async def another_group(
    r: Rig, name: str = "b", script: Choose | Script | None = None, *, model: str = MODEL, serves: bool = True
) -> AsyncIterator[FakeScheduler]:
    """Beside the default group. Known to the gateway, which has heard what both have to do."""
    r.fake.set_load(load())
    chosen = script if script is not None else Script(ids=list(b"hello world"))
    other = FakeScheduler(chosen if callable(chosen) else lambda _: chosen, group=name, load=load(model=model))
    await other.start(r.store)
    try:
        await until(lambda: ready(r, name) == float(serves) and bool(other.hellos))
        await until(lambda: ready(r, "default") == 1.0)
        yield other
    finally:
        await other.stop()


def ready(r: Rig, group: str) -> float | None:
    labels = {"model_name": "tiny", "group": group}
    return r.gateway.engine.metrics.registry.get_sample_value("fastserve:group_ready", labels)


def live(r: Rig, group: str) -> float:
    return r.metric("group_requests", group=group)


def endless() -> tuple[Script, asyncio.Semaphore]:
    gate = asyncio.Semaphore(0)
    return Script(ids=ids_of(ANSWER), gate=gate), gate


def open_wide(gate: asyncio.Semaphore) -> None:
    for _ in range(200):
        gate.release()


async def test_equal_groups_take_turns(tmp_path: Path) -> None:
    script, gate = endless()
    async with rig(tmp_path, script) as r, another_group(r, script=script) as other:
        answers = [asyncio.create_task(r.complete(max_tokens=len(ids_of(ANSWER)))) for _ in range(6)]
        await until(lambda: len(r.fake.jobs) + len(other.jobs) == 6)
        assert (len(r.fake.jobs), len(other.jobs)) == (3, 3)
        assert (live(r, "default"), live(r, "b")) == (3, 3)
        open_wide(gate)
        assert {(await answer).json()["choices"][0]["text"] for answer in answers} == {ANSWER}
        await r.quiet()
        assert r.outcomes() == {"length": 6}
        assert (live(r, "default"), live(r, "b")) == (0, 0)


async def test_the_group_with_the_least_to_do_per_pipeline_is_chosen(tmp_path: Path) -> None:
    async with rig(tmp_path) as r, another_group(r) as other:

        async def goes_to_the_other(first: scheduler_pb2.Load, second: scheduler_pb2.Load) -> bool:
            before = len(other.jobs)
            r.fake.set_load(first)
            other.set_load(second)
            by_name = r.gateway.engine._link._groups
            wanted = {"default": first, "b": second}
            await until(
                lambda: all(by_name[name].link.load.waiting_tokens == w.waiting_prompt_tokens
                            and by_name[name].link.load.live == w.live for name, w in wanted.items())
            )  # fmt: skip
            assert (await r.complete(prompt=[97] * 10)).status_code == 200
            return len(other.jobs) > before

        assert await goes_to_the_other(load(100, 1), load(50, 90))
        assert not await goes_to_the_other(load(49, 90), load(50, 1))
        assert await goes_to_the_other(load(0, 3), load(0, 2)), "as little waits: fewer requests"
        assert await goes_to_the_other(load(100, 0), load(300, 0, pipelines=4))
        assert not await goes_to_the_other(load(70, 0), load(300, 0, pipelines=4))


async def test_what_was_sent_since_the_last_report_counts(tmp_path: Path) -> None:
    script, gate = endless()
    async with rig(tmp_path, script) as r, another_group(r, script=script) as other:
        large = asyncio.create_task(r.complete(prompt=[97] * 50, max_tokens=1))
        await until(lambda: len(r.fake.jobs) + len(other.jobs) == 1)
        small = [asyncio.create_task(r.complete(prompt=[97] * 10, max_tokens=1)) for _ in range(5)]
        await until(lambda: len(r.fake.jobs) + len(other.jobs) == 6)
        assert sorted((len(r.fake.jobs), len(other.jobs))) == [1, 5]
        open_wide(gate)
        await asyncio.gather(large, *small)


async def test_a_group_that_goes_away_is_done_without_and_its_streams_wait_for_it(tmp_path: Path) -> None:
    script, gate = endless()
    async with rig(tmp_path, script) as r, another_group(r, script=script) as other:
        tasks = [asyncio.create_task(r.stream(prompt="x", max_tokens=len(ids_of(ANSWER)))) for _ in range(2)]
        await until(lambda: len(r.fake.jobs) == len(other.jobs) == 1)
        for _ in range(6):
            gate.release()
        await until(lambda: r.metric("generation_tokens_total") == 6)
        delivered = other.jobs[0].sent
        await other.stop()
        await until(lambda: ready(r, "b") == 0.0)
        assert r.gateway.engine.not_ready() is None
        new = [asyncio.create_task(r.complete(max_tokens=1)) for _ in range(2)]
        await until(lambda: len(r.fake.jobs) == 3)
        assert live(r, "b") == 1, "it waits for its own scheduler"
        open_wide(gate)
        assert [(await answer).status_code for answer in new] == [200, 200]
        await other.start(r.store)
        for task in tasks:
            assert "".join(event["choices"][0]["text"] for event in await task) == ANSWER
        assert other.jobs[-1].delivered == ids_of(ANSWER)[:delivered]
        await r.quiet()


async def test_another_group_goes_on_with_the_streams_of_one_that_does_not_come_back(tmp_path: Path) -> None:
    script, gate = endless()
    async with rig(tmp_path, script, reconnect_timeout=0.05) as r, another_group(r, script=script) as other:
        tasks = [asyncio.create_task(r.stream(prompt="x", max_tokens=len(ids_of(ANSWER)))) for _ in range(4)]
        await until(lambda: len(r.fake.jobs) == len(other.jobs) == 2)
        for _ in range(8):
            gate.release()
        await until(lambda: r.metric("generation_tokens_total") == 8)
        await other.stop()
        await until(lambda: len(r.fake.jobs) == 4)
        open_wide(gate)
        for task in tasks:
            assert "".join(event["choices"][0]["text"] for event in await task) == ANSWER
        moved = r.fake.jobs[2:]
        assert [job.submit.request_id for job in moved] == [job.submit.request_id for job in other.jobs]
        assert [job.delivered for job in moved] == [ids_of(ANSWER)[: job.sent] for job in other.jobs]
        await r.quiet()
        await other.start(r.store)
        await until(lambda: ready(r, "b") == 1.0)
        assert len(other.jobs) == 2, "what went elsewhere does not come back"


async def test_with_no_group_left_everything_is_as_with_one(tmp_path: Path) -> None:
    script, _ = endless()
    async with rig(tmp_path, script, reconnect_timeout=0.05) as r, another_group(r, script=script) as other:
        lost = [asyncio.create_task(r.complete()) for _ in range(2)]
        await until(lambda: len(r.fake.jobs) == len(other.jobs) == 1)
        await other.stop()
        await r.fake.stop()
        assert [(await answer).status_code for answer in lost] == [503, 503]
        await until(lambda: r.gateway.engine.not_ready() is not None)
        assert (await r.http.get("/health/ready")).status_code == 503
        assert (await r.complete()).status_code == 503


@pytest.mark.parametrize(
    "reason",
    [
        scheduler_pb2.REJECT_REASON_QUEUE_FULL_REQUESTS,
        scheduler_pb2.REJECT_REASON_DRAINING,
        scheduler_pb2.REJECT_REASON_NOT_READY,
    ],
)
async def test_what_one_group_has_no_room_for_is_tried_at_the_others(
    tmp_path: Path, reason: scheduler_pb2.RejectReason.ValueType
) -> None:
    full = Script(reject=reason)
    async with rig(tmp_path) as r, another_group(r, script=full) as other:
        assert [(await r.complete()).status_code for _ in range(4)] == [200] * 4
        assert len(other.jobs) >= 1
        assert len(r.fake.jobs) == 4
        r.fake.script = lambda _: full
        expected = 429 if reason == scheduler_pb2.REJECT_REASON_QUEUE_FULL_REQUESTS else 503
        assert (await r.complete()).status_code == expected, "each was asked once"
        await r.quiet()


async def test_what_is_wrong_is_refused_once(tmp_path: Path) -> None:
    wrong = Script(reject=scheduler_pb2.REJECT_REASON_TOO_LONG)
    async with rig(tmp_path, wrong) as r, another_group(r, script=wrong) as other:
        assert (await r.complete()).status_code == 400
        assert len(r.fake.jobs) + len(other.jobs) == 1


async def test_answers_of_one_request_may_be_in_several_groups_and_are_aborted_in_all(tmp_path: Path) -> None:
    script, _ = endless()
    async with rig(tmp_path, script) as r, another_group(r, script=script) as other:
        answer = asyncio.create_task(r.complete(n=4, request_id="mine"))
        await until(lambda: len(r.fake.jobs) == len(other.jobs) == 2)
        assert r.gateway.engine.abort("mine")
        await answer
        await until(lambda: not r.fake.live() and not other.live())
        assert all(job.cancelled == scheduler_pb2.CANCEL_REASON_CLIENT for job in (*r.fake.jobs, *other.jobs))


async def test_a_group_with_another_model_gets_no_requests(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        async with rig(tmp_path) as r, another_group(r, model="another-model", serves=False) as other:
            for _ in range(4):
                assert (await r.complete()).status_code == 200
            assert (len(r.fake.jobs), len(other.jobs)) == (4, 0)
            assert "groups that serve another model" in caplog.text
            other.set_load(load())
            await until(lambda: ready(r, "b") == 1.0)


async def test_a_gateway_may_be_told_which_groups_are_its_own(tmp_path: Path) -> None:
    async with rig(tmp_path, group=("default",)) as r:
        other = FakeScheduler(lambda _: Script(), group="b", load=load())
        await other.start(r.store)
        members = r.gateway.engine._link._store.members
        asked = 0

        async def counted(role: str) -> dict[str, dict[str, str]]:
            nonlocal asked
            found = await members(role)
            asked += role == link.ROLE
            return found

        r.gateway.engine._link._store.members = counted  # type: ignore[method-assign]  # to know that it has looked
        await until(lambda: asked >= 3)
        assert list(r.gateway.engine._link.counts()) == ["default"]
        assert not other.hellos
        await other.stop()


async def test_limits_are_those_of_the_strictest_group(tmp_path: Path) -> None:
    async with rig(tmp_path) as r, another_group(r) as other:
        assert (await r.http.get("/v1/models")).json()["data"][0]["max_model_len"] == 1000
        other.set_limit(100)
        await until(lambda: r.gateway.engine.max_model_len == 100)
        assert (await r.complete(max_tokens=150)).status_code == 400
        await other.stop()
        await until(lambda: r.gateway.engine.max_model_len == 1000)


async def test_a_group_that_stays_away_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig(tmp_path) as r, another_group(r) as other:
        await other.stop()
        await r.store.unregister("scheduler", other.member)
        await until(lambda: ready(r, "b") == 0.0)
        monkeypatch.setattr(groups, "FORGET_S", 0.0)
        await until(lambda: ready(r, "b") is None)
        assert (await r.complete()).status_code == 200
        await other.start(r.store)
        await until(lambda: ready(r, "b") == 1.0)


async def test_the_page_shows_all_groups_added_up(tmp_path: Path) -> None:
    async with rig(tmp_path) as r, another_group(r) as other:
        r.fake.state = scheduler_pb2.GetStateResponse(policy="fake", running=3, waiting=1, longest_wait_ms=7)
        other.state = scheduler_pb2.GetStateResponse(policy="fake", running=2, longest_wait_ms=9)
        shown = await r.gateway.engine.scheduler_state()
        assert (shown.running, shown.waiting, shown.longest_wait_ms) == (5, 1, 9)
        await other.stop()
        await until(lambda: ready(r, "b") == 0.0)
        assert (await r.gateway.engine.scheduler_state()).running == 3
