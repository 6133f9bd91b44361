"""A request can be given up in every state, and nothing of it stays."""

import asyncio
from array import array
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from fastserve_scheduler import replica
from fastserve_scheduler.gateway_link import GatewayLink
from fastserve_scheduler.inbox import Inbox
from fastserve_scheduler.inputs import FromGateway, Input, LinkClosed
from fastserve_scheduler.messages import Sampling, Submit

from .rig import Answer, Cluster, TestGateway, until, until_async
from .stages import oracle

Enter = Callable[[Cluster, TestGateway], Awaitable[Answer]]


async def _queued(cluster: Cluster, gateway: TestGateway) -> Answer:
    cluster.rig.scripts[0].gate.clear()
    for n in range(2):
        await gateway.submit([n] * 8, 20)
    answer = await gateway.submit([9] * 8, 20, request_id="it")

    async def waits() -> bool:
        return (await cluster.state()).waiting >= 1

    await until_async(waits)
    return answer


async def _in_prefill(cluster: Cluster, gateway: TestGateway) -> Answer:
    cluster.rig.scripts[0].gate.clear()
    answer = await gateway.submit([9] * 8, 20, request_id="it")
    await until(lambda: len(cluster.rig.scripts[0].plans) == 1)
    return answer


async def _between_chunks(cluster: Cluster, gateway: TestGateway) -> Answer:
    script = cluster.rig.scripts[0]
    script.fault = lambda plan: script.gate.clear() if len(script.plans) == 2 else None
    answer = await gateway.submit([9] * 60, 20, request_id="it")
    await until(lambda: len(script.plans) >= 2)
    return answer


async def _decoding(cluster: Cluster, gateway: TestGateway) -> Answer:
    answer = await gateway.submit([9] * 8, 400, request_id="it")
    await until(lambda: len(answer.ids) >= 5)
    return answer


async def _preempted(cluster: Cluster, gateway: TestGateway) -> Answer:
    answer = await gateway.submit([9] * 8, 400, request_id="it")
    await until(lambda: len(answer.ids) >= 20)
    cluster.rig.scripts[0].gate.clear()
    for n in range(2):
        await gateway.submit([n] * 8, 20)

    async def waits() -> bool:
        return (await cluster.state()).waiting >= 1

    await until_async(waits)
    return answer


async def _while_a_stage_is_gone(cluster: Cluster, gateway: TestGateway) -> Answer:
    answer = await _decoding(cluster, gateway)
    await cluster.rig.kill(0)
    await until(lambda: not gateway.statuses[-1].ready)
    return answer


STATES: dict[str, Enter] = {
    "queued": _queued,
    "in prefill": _in_prefill,
    "between chunks": _between_chunks,
    "decoding": _decoding,
    "preempted": _preempted,
    "stage gone": _while_a_stage_is_gone,
}


@pytest.mark.parametrize("by", ["cancel", "disconnect"])
@pytest.mark.parametrize("state", STATES)
async def test_abort_leaves_nothing_behind(tmp_path: Path, state: str, by: str) -> None:
    """The harness checks the ledger at the end: all blocks free, nothing running, nothing waiting."""
    flags = ["--max-num-seqs", "1", "--max-num-batched-tokens", "32", "--reattach-grace", "0"]
    async with Cluster(tmp_path, 2, flags=flags) as cluster:
        gateway = await cluster.gateway()
        answer = await STATES[state](cluster, gateway)
        if by == "cancel":
            await gateway.cancel("it")
        else:
            await gateway.close()
        cluster.rig.scripts[0].gate.set()
        if cluster.rig.stages[0] is None:
            await cluster.rig.start(0)
        if by == "cancel":
            assert (await answer.done()).reason == "CANCELLED"
        other = await cluster.gateway("other")
        assert (await other.ask([3, 4], 6)).ids == oracle([3, 4], 6)


async def test_after_a_cut_at_most_two_more_iterations_are_planned(tmp_path: Path) -> None:
    async with Cluster(tmp_path, 2, flags=["--reattach-grace", "0"]) as cluster:
        script = cluster.rig.scripts[0]
        gateway = await cluster.gateway()
        answers = [await gateway.submit([n], 400) for n in range(20)]
        await until(lambda: all(len(answer.ids) >= 3 for answer in answers))
        script.gate.clear()
        planned = len(script.plans)
        for request_id in list(gateway.answers):
            await gateway.cancel(request_id)

        async def aborted() -> bool:
            state = await cluster.state()
            return state.waiting == 0

        await until_async(aborted)
        script.gate.set()
        await asyncio.gather(*(answer.done() for answer in answers))
        await until_async(cluster.ledger_is_clean)
        assert len(script.plans) <= planned + 2
        assert {answer.reason for answer in answers} == {"CANCELLED"}


async def _break_off(cluster: Cluster, number: int) -> None:
    gateway = await cluster.gateway(f"gw-{number}")
    for n in range(10):
        await gateway.submit([n, number], 100)
    await until(lambda: any(answer.ids for answer in gateway.answers.values()))
    await gateway.close()
    cluster.gateways.remove(gateway)


async def test_mass_disconnects_at_random_points_leave_no_task_behind(tmp_path: Path) -> None:
    async with Cluster(tmp_path, flags=["--reattach-grace", "0"]) as cluster:
        await _break_off(cluster, 0)  # the server starts what it keeps for each method with its first call
        await until_async(cluster.ledger_is_clean)
        before = len(asyncio.all_tasks())
        for number in range(1, 50):
            await _break_off(cluster, number)
        await until_async(cluster.ledger_is_clean)
        await until(lambda: len(asyncio.all_tasks()) <= before + 4)


async def test_a_submit_that_is_read_after_its_stream_broke_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a stream overtakes what the gateway said before; nobody would abort such a request."""
    inboxes: list[Inbox[Input]] = []

    class Seen(Inbox[Input]):
        def __init__(self) -> None:
            super().__init__()
            inboxes.append(self)

    monkeypatch.setattr(replica, "Inbox", Seen)
    async with Cluster(tmp_path, flags=["--reattach-grace", "0"]) as cluster:
        gateway = await cluster.gateway()
        [inbox] = inboxes
        link = GatewayLink("gone")
        submit = Submit("r", array("I", [1]), array("I"), Sampling(), 100)
        await inbox.put(FromGateway(link, submit))
        inbox.put_now(LinkClosed(link))
        assert (await gateway.ask([3, 4], 6)).ids == oracle([3, 4], 6)
        assert (await cluster.state()).tokens_generated == 6


async def test_cancelling_what_is_not_there_changes_nothing(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        one, two = await cluster.gateway("one"), await cluster.gateway("two")
        answer = await one.submit([1], 30, request_id="mine")
        await two.cancel("mine")
        await two.cancel("never was")
        assert (await answer.done()).ids == oracle([1], 30)
