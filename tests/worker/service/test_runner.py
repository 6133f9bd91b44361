"""The stage's thread, and what goes back on a Control stream."""

import asyncio
import threading
from functools import partial

import pytest

from fastserve.v1 import stage_pb2
from fastserve_common.errors import ResourceExhaustedError, UnavailableError
from fastserve_worker import control
from fastserve_worker.control import ControlSession
from fastserve_worker.runner import StageRunner


async def test_work_runs_in_order_on_one_thread_that_is_not_the_loops() -> None:
    runner = StageRunner()
    order: list[int] = []

    def note(number: int) -> int:
        order.append(number)
        return threading.get_ident()

    threads = await asyncio.gather(*(runner.submit(partial(note, number)) for number in range(20)))
    assert order == list(range(20))
    assert len(set(threads)) == 1
    assert threads[0] != threading.get_ident()
    assert await runner.close(5)


async def test_an_error_is_the_callers_and_the_thread_goes_on() -> None:
    runner = StageRunner()
    with pytest.raises(ZeroDivisionError):
        await runner.submit(lambda: 1 // 0)
    assert await runner.submit(lambda: 7) == 7
    assert await runner.close(5)


async def test_waiting_work_is_limited_and_what_was_cancelled_never_runs() -> None:
    runner, gate, begun = StageRunner(max_queued=2), threading.Event(), threading.Event()
    ran: list[str] = []

    def hold() -> None:
        begun.set()
        gate.wait()

    held = runner.submit(hold)
    await asyncio.to_thread(begun.wait)
    cancelled = runner.submit(lambda: ran.append("cancelled"))
    kept = runner.submit(lambda: ran.append("kept"))
    with pytest.raises(ResourceExhaustedError, match="more than 2 pieces of work"):
        runner.submit(lambda: None)
    assert runner.busy_s() > 0
    cancelled.cancel()
    await asyncio.sleep(0)  # the thread hears of it in the loop's next turn
    gate.set()
    await asyncio.gather(held, kept)
    assert ran == ["kept"]
    assert await runner.close(5)
    assert runner.busy_s() == 0


async def test_work_that_does_not_end_cannot_keep_the_process() -> None:
    runner, gate = StageRunner(), threading.Event()
    held = runner.submit(gate.wait)
    assert not await runner.close(0.05)
    gate.set()
    await held


async def test_a_session_gives_out_what_was_sent_before_it_ended() -> None:
    session = ControlSession()
    session.send(stage_pb2.StageMessage())
    session.end(UnavailableError("over"))
    session.end()
    session.send(stage_pb2.StageMessage())
    messages = session.messages()
    assert await anext(messages) == stage_pb2.StageMessage()
    with pytest.raises(UnavailableError, match="over"):
        await anext(messages)


async def test_a_scheduler_that_does_not_read_loses_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "MAX_QUEUED_REPORTS", 2)
    session = ControlSession()
    for _ in range(4):
        session.send(stage_pb2.StageMessage())
    messages = session.messages()
    assert [await anext(messages) for _ in range(2)] == [stage_pb2.StageMessage()] * 2
    with pytest.raises(ResourceExhaustedError, match="more than 2 reports"):
        await anext(messages)
