"""Swaps under way when something else happens: an abort, a lost report, a stage or the kvstore that dies."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from fastserve_worker.fake_stage import FakeOptions
from fastserve_worker.messages import SwapDirection

from .rig import Answer, TestGateway, until, until_async
from .swap_rig import SwapCluster, ask, be_quick

OUT, IN = SwapDirection.OUT, SwapDirection.IN

#: The first request; "it" in the tests.
IT = 1
#: It runs for a third of a second, so that it is still there when the others come.
ITERATION_NS = 3_000_000
FLAGS = ("--policy", "srpt", "--max-num-seqs", "2", "--reattach-grace", "0", "--swap-timeout", "0.5")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    be_quick(monkeypatch)


def _cluster(folder: Path, policy: str = "reactive", options: FakeOptions | None = None) -> SwapCluster:
    """Forty blocks; two of the others fill them."""
    options = options or FakeOptions(iteration_ns=ITERATION_NS, token_ns=1_000)
    flags = [*FLAGS, "--kv-policy", policy]
    return SwapCluster(folder, 2, num_blocks=40, num_slots=256, options=options, flags=flags)


async def _it(gateway: TestGateway) -> tuple[Answer, list[int]]:
    return await ask(gateway, 0, 8, 100)


async def _others(gateway: TestGateway) -> list[tuple[Answer, list[int]]]:
    """They are shorter, so they come first."""
    return [await ask(gateway, n, 60, 16) for n in range(1, 4)]


Asked = list[tuple[Answer, list[int]]]
Enter = Callable[[SwapCluster, TestGateway], Awaitable[Asked]]


async def _queued(cluster: SwapCluster, gateway: TestGateway) -> Asked:
    cluster.compute(False)
    it, others = await _it(gateway), await _others(gateway)

    async def waits() -> bool:
        return (await cluster.state()).waiting >= 1

    await until_async(waits)
    return [it, *others]


async def _running(cluster: SwapCluster, gateway: TestGateway) -> Asked:
    it = await _it(gateway)
    await until(lambda: len(it[0].ids) > 5)
    cluster.compute(False)
    return [it]


async def _begin_out(cluster: SwapCluster, gateway: TestGateway) -> Asked:
    it = await _it(gateway)
    await until(lambda: len(it[0].ids) > 5)
    others = await _others(gateway)
    await until(lambda: cluster.script.has_begun(IT, OUT))
    return [it, *others]


async def _swapping_out(cluster: SwapCluster, gateway: TestGateway) -> Asked:
    cluster.script.hold(IT, OUT)
    return await _begin_out(cluster, gateway)


async def _on_host(cluster: SwapCluster, gateway: TestGateway) -> Asked:
    asked = await _swapping_out(cluster, gateway)
    cluster.compute(False)
    cluster.script.release()

    async def swapped() -> bool:
        return (await cluster.state()).swapped >= 1

    await until_async(swapped)
    return asked


async def _swapping_in(cluster: SwapCluster, gateway: TestGateway) -> Asked:
    asked = await _on_host(cluster, gateway)
    cluster.script.hold(IT, IN)
    cluster.compute(True)
    await until(lambda: cluster.script.has_begun(IT, IN))
    return asked


STATES: dict[str, Enter] = {
    "queued": _queued,
    "running": _running,
    "swapping out": _swapping_out,
    "on host": _on_host,
    "swapping in": _swapping_in,
}


@pytest.mark.parametrize("by", ["cancel", "disconnect"])
@pytest.mark.parametrize("state", STATES)
async def test_an_abort_gives_back_every_block_and_slot(tmp_path: Path, state: str, by: str) -> None:
    """The rig looks at the ledgers at the end; that of the kvstore too."""
    async with _cluster(tmp_path) as cluster:
        gateway = await cluster.gateway()
        asked = await STATES[state](cluster, gateway)
        if by == "cancel":
            await gateway.cancel("0")
            if "swapping" in state or state == "on host":
                assert (await asked[0][0].done()).reason == "CANCELLED"  # no copy is waited for
        else:
            await gateway.close()
        cluster.script.release()
        cluster.compute(True)
        if by == "cancel":
            assert (await asked[0][0].done()).reason == "CANCELLED"
            for answer, expected in asked[1:]:
                assert (await answer.done()).ids == expected
        answer, expected = await ask(await cluster.gateway("other"), 9, 20, 10)
        assert (await answer.done()).ids == expected


@pytest.mark.parametrize("abort", [False, True])
async def test_a_stage_that_loses_a_report_is_given_up(
    tmp_path: Path, abort: bool, caplog: pytest.LogCaptureFixture
) -> None:
    options = FakeOptions(iteration_ns=ITERATION_NS, token_ns=1_000, lost_swaps=frozenset({1}))
    async with _cluster(tmp_path, options=options) as cluster:
        gateway = await cluster.gateway()
        asked = await _begin_out(cluster, gateway)
        if abort:
            await gateway.cancel("0")
            assert (await asked[0][0].done()).reason == "CANCELLED"
        await until(lambda: "no word of swap 1 " in caplog.text)
        for answer, expected in asked[abort:]:
            assert (await answer.done()).ids == expected


async def test_a_swap_that_fails_costs_its_request_its_kv_and_no_token(tmp_path: Path) -> None:
    options = FakeOptions(
        iteration_ns=ITERATION_NS, token_ns=1_000, failed_swaps=dict.fromkeys(range(1, 40, 2), "ordered")
    )
    async with _cluster(tmp_path, options=options) as cluster:
        for answer, expected in await _begin_out(cluster, await cluster.gateway()):
            assert (await answer.done()).ids == expected


@pytest.mark.parametrize("state", ["swapping out", "on host", "swapping in"])
@pytest.mark.parametrize("victim", [0, 1])
async def test_what_is_on_the_host_outlives_a_stage(tmp_path: Path, state: str, victim: int) -> None:
    async with _cluster(tmp_path) as cluster:
        gateway = await cluster.gateway()
        asked = await STATES[state](cluster, gateway)
        if state != "swapping out":
            await until_async(cluster.something_is_committed)
        cluster.script.begun.clear()
        cluster.compute(True)
        await cluster.kill_stage(victim)
        await until(lambda: not gateway.statuses[-1].ready)
        await cluster.start_stage(victim)
        for answer, expected in asked:
            assert (await answer.done()).ids == expected
        if state != "swapping out":
            assert cluster.script.has_begun(IT, IN), "it was computed again, though its KV was kept"
        assert (await cluster.state()).host_blocks_total == cluster.num_slots


@pytest.mark.parametrize("state", ["swapping out", "on host", "swapping in"])
async def test_requests_outlive_the_kvstore(tmp_path: Path, state: str) -> None:
    """Recipe of a daemon that is killed with requests on the host: they are computed again."""
    async with _cluster(tmp_path) as cluster:
        gateway = await cluster.gateway()
        for number in range(2):
            asked = await STATES[state](cluster, gateway) if number == 0 else await _others(gateway)
            await cluster.kvstore.kill()
            await until_async(cluster.has_no_slots)
            cluster.script.release()
            cluster.compute(True)
            for answer, expected in asked:
                assert (await answer.done()).ids == expected
            gateway.answers.clear()
            await cluster.kvstore.start()
            await cluster.until_granted()
        cluster.script.begun.clear()
        for answer, expected in [await ask(gateway, n, 30, 60) for n in range(5)]:
            assert (await answer.done()).ids == expected
        assert cluster.script.begun, "the new one is used"


async def test_the_next_scheduler_begins_with_an_empty_host(tmp_path: Path) -> None:
    """It knows nothing of what is there; the requests come back with what was delivered, and are computed again."""
    async with _cluster(tmp_path) as cluster:
        gateway = await cluster.gateway()
        [(answer, expected), *_] = await _on_host(cluster, gateway)
        await cluster.schedulers[0].crash()
        cluster.compute(True)
        await until(lambda: gateway.closed)
        delivered = list(answer.ids)
        await cluster.start_scheduler()
        await cluster.until_granted()
        assert await cluster.nothing_is_committed()
        again = await (await cluster.gateway("again")).ask([1, *range(7)], 100, delivered=delivered)
        assert again.ids == expected


async def test_a_stage_that_is_not_attached_ends_swapping_until_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with _cluster(tmp_path) as cluster:
        gateway = await cluster.gateway()
        asked = await _on_host(cluster, gateway)
        cluster.compute(True)
        await cluster.kill_stage(1)
        await until(lambda: not gateway.statuses[-1].ready)
        await cluster.start_stage(1, attached=False)
        await until_async(cluster.has_no_slots)
        cluster.script.begun.clear()
        for answer, expected in asked:
            assert (await answer.done()).ids == expected
        assert not cluster.script.begun
        assert "do not share host memory" in caplog.text
        await cluster.kill_stage(1)
        await cluster.start_stage(1)
        await cluster.until_granted()
