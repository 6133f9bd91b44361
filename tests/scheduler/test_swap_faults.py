"""Swaps under way when something else happens: a lost report, a stage or the kvstore that dies."""

from pathlib import Path

import pytest

from fastserve_common import segments
from fastserve_kvstore.slabs import PAGE_BYTES
from fastserve_worker.fake_stage import FakeOptions

from .rig import until, until_async
from .swap_rig import ask, be_quick
from .swap_states import IN, ITERATION_NS, STATES, ask_others, begin_out, swap_cluster


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    be_quick(monkeypatch)


@pytest.mark.parametrize("abort", [False, True])
async def test_a_stage_that_loses_a_report_is_given_up(
    tmp_path: Path, abort: bool, caplog: pytest.LogCaptureFixture
) -> None:
    options = FakeOptions(iteration_ns=ITERATION_NS, token_ns=1_000, lost_swaps=frozenset({1}))
    async with swap_cluster(tmp_path, options=options) as cluster:
        gateway = await cluster.gateway()
        asked = await begin_out(cluster, gateway)
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
    async with swap_cluster(tmp_path, options=options) as cluster:
        for answer, expected in await begin_out(cluster, await cluster.gateway()):
            assert (await answer.done()).ids == expected


@pytest.mark.parametrize("stage", [0, 1])
async def test_a_bit_that_flips_on_the_host_costs_its_request_its_kv_and_no_token(
    tmp_path: Path, stage: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Checksums notice before anything is computed with it; the request is computed again, and others go on."""
    async with swap_cluster(tmp_path, checksums=True) as cluster:
        gateway = await cluster.gateway()
        asked = await STATES["on host"](cluster, gateway)
        await until_async(cluster.something_is_committed)
        (facts,) = (await cluster.store.members("kvstore")).values()
        order = next(order for order in cluster.script.begun if order.job_id == cluster.script.it)
        slab_bytes = -(-cluster.num_slots * cluster.slot_bytes // PAGE_BYTES) * PAGE_BYTES
        with segments.attach(facts["segment"]) as memory:
            memory[stage * slab_bytes + order.host_slots[1] * cluster.slot_bytes + 3] ^= 0x10
        cluster.compute(True)
        for answer, expected in asked:
            assert (await answer.done()).ids == expected
        assert cluster.script.has_begun(cluster.script.it, IN), "its KV was asked for"
        failed = [record for record in caplog.records if "checksum mismatch" in record.getMessage()]
        assert failed


@pytest.mark.parametrize("state", ["swapping out", "on host", "swapping in"])
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.full)])
async def test_what_is_on_the_host_outlives_a_stage(tmp_path: Path, state: str, victim: int) -> None:
    async with swap_cluster(tmp_path) as cluster:
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
            assert cluster.script.has_begun(cluster.script.it, IN), "it was computed again, though its KV was kept"
        assert (await cluster.state()).host_blocks_total == cluster.num_slots


@pytest.mark.parametrize("state", ["swapping out", "on host", "swapping in"])
async def test_requests_outlive_the_kvstore(tmp_path: Path, state: str) -> None:
    """A kvstore is killed with requests on the host: they are computed again."""
    async with swap_cluster(tmp_path) as cluster:
        gateway = await cluster.gateway()
        for number in range(2):
            asked = await STATES[state](cluster, gateway) if number == 0 else await ask_others(gateway)
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
    async with swap_cluster(tmp_path) as cluster:
        gateway = await cluster.gateway()
        [(answer, expected), *_] = await STATES["on host"](cluster, gateway)
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
    async with swap_cluster(tmp_path) as cluster:
        gateway = await cluster.gateway()
        asked = await STATES["on host"](cluster, gateway)
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
