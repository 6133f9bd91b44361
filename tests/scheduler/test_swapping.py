"""Swapping end to end: a real kvstore, stages that really copy. A wrong or an early copy shows as a wrong token."""

import random
from pathlib import Path

import pytest

from fastserve_scheduler.core.kv import KV_POLICIES
from fastserve_scheduler.journal_reader import replay
from fastserve_scheduler.swap_metrics import swap_families
from fastserve_scheduler.tally_metrics import residency_families
from fastserve_worker.fake_stage import FakeOptions
from fastserve_worker.messages import SwapDirection

from .rig import until, until_async
from .swap_rig import BLOCK_BYTES, SwapCluster, ask, be_quick, random_swaps

SWAPPING = ("proactive", "reactive")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    be_quick(monkeypatch)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("policy", KV_POLICIES)
async def test_a_working_set_of_several_pools_gets_the_oracles_tokens(
    tmp_path: Path, policy: str, num_stages: int
) -> None:
    """Sixteen requests of up to twelve blocks, in a pool of thirty-two: up to six times as much as it holds."""
    rng = random.Random(f"{policy} {num_stages}")
    options = FakeOptions(iteration_ns=200_000, token_ns=1_000, swap_delays_ns=random_swaps(rng))
    flags = ["--kv-policy", policy, "--max-num-seqs", "3", "--alpha-ms", "30", "--quantum-ratio", "2"]
    async with SwapCluster(tmp_path, num_stages, num_blocks=32, num_slots=256, options=options, flags=flags) as cluster:
        gateway = await cluster.gateway()
        asked = [await ask(gateway, n, rng.randrange(4, 16), rng.randrange(20, 33)) for n in range(16)]
        for answer, expected in asked:
            assert (await answer.done()).ids == expected
        assert (await cluster.state()).swaps_out > 0 or policy not in SWAPPING


@pytest.mark.parametrize("num_slots", [1, 0])
@pytest.mark.parametrize("policy", SWAPPING)
async def test_without_room_on_the_host_requests_are_computed_again(
    tmp_path: Path, policy: str, num_slots: int
) -> None:
    flags = ["--kv-policy", policy, "--max-num-seqs", "3", "--alpha-ms", "30"]
    async with SwapCluster(tmp_path, 2, num_blocks=24, num_slots=num_slots, flags=flags) as cluster:
        gateway = await cluster.gateway()
        asked = [await ask(gateway, n, 8, 24) for n in range(9)]
        for answer, expected in asked:
            assert (await answer.done()).ids == expected


@pytest.mark.parametrize("policy", SWAPPING)
async def test_slow_swaps_of_others_do_not_hold_up_a_prompt_that_fills_the_pool(tmp_path: Path, policy: str) -> None:
    """Three requests of 7 blocks go to the host for a prompt of 22, of 24 that there are. They are on their way back,
    200 ms each, when another one comes: copies that landed belong to requests behind the one that needs their blocks,
    and nothing may wait for ever."""
    options = FakeOptions(iteration_ns=5_000_000, token_ns=1_000, swap_ns=200_000_000)
    flags = ["--kv-policy", policy, "--policy", "fixed-priority", "--max-num-seqs", "4"]
    async with SwapCluster(
        tmp_path, 2, num_blocks=24, num_slots=64, block_size=16, options=options, flags=flags, tight=True
    ) as cluster:
        gateway = await cluster.gateway()
        low = [await ask(gateway, n, 100, 60, priority=1) for n in range(3)]
        await until(lambda: all(answer.ids for answer, _ in low))
        first = await ask(gateway, 3, 350, 2)
        await until(lambda: any(order.direction is SwapDirection.IN for order in cluster.script.begun))
        again = await ask(gateway, 4, 350, 2)
        for answer, expected in [*low, first, again]:
            assert (await answer.done()).ids == expected
        went = {order.job_id for order in cluster.script.begun if order.direction is SwapDirection.OUT}
        assert went >= {1, 2, 3}


@pytest.mark.parametrize("policy", ["proactive", pytest.param("reactive", marks=pytest.mark.full)])
async def test_requests_do_not_chase_each_other_out_of_the_pool(tmp_path: Path, policy: str) -> None:
    """Six requests of 6 blocks that grow by 200 tokens, in a pool of 24, copies of 100 ms: each is stopped a few times,
    not at every step. (How few times, and how fast they are, is told by the same ones in simulated time.)"""
    options = FakeOptions(iteration_ns=1_000_000, token_ns=1_000, swap_ns=100_000_000)
    flags = ["--kv-policy", policy, "--max-num-seqs", "6", "--alpha-ms", "60000"]
    async with SwapCluster(
        tmp_path, 2, num_blocks=24, num_slots=64, block_size=16, options=options, flags=flags, tight=True
    ) as cluster:
        gateway = await cluster.gateway()
        asked = [await ask(gateway, n, 96, 200) for n in range(6)]
        for answer, expected in asked:
            assert (await answer.done()).ids == expected
            assert answer.finished is not None
            assert answer.finished.preemptions <= 200 // 10
        state = await cluster.state()
        assert state.swaps_out > 0
        working_set_bytes = 6 * 19 * 4 * 16 * 2
        assert state.swap_bytes_out <= 3 * working_set_bytes


async def test_a_journal_with_swaps_replays_and_metrics_tell_of_them(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    flags = ["--kv-policy", "proactive", "--kv-ranking", "enst", "--max-num-seqs", "3", "--journal", str(journal)]
    async with SwapCluster(tmp_path, 2, num_blocks=32, num_slots=64, flags=[*flags, "--alpha-ms", "30"]) as cluster:
        gateway = await cluster.gateway()
        for answer, expected in [await ask(gateway, n, 8, 32) for n in range(12)]:
            assert (await answer.done()).ids == expected
        await cluster.kvstore.kill()
        await until_async(cluster.has_no_slots)
        await cluster.kvstore.start()
        await cluster.until_granted()
        await until_async(cluster.ledger_is_clean)
        state = await cluster.state()
    result = replay(journal, check=True)
    assert result.divergence is None
    swap = result.core.snapshot().swap
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in swap_families(swap)
        for sample in family.samples
    }
    assert samples["fastserve:swap_bytes_total", "out"] == state.swap_bytes_out > 0
    assert state.swap_bytes_out % (2 * BLOCK_BYTES) == 0, "both stages copied the same blocks"
    assert samples["fastserve:swaps_total", "in"] == state.swaps_in > 0
    assert samples["fastserve:host_slots",] == 64
    for name in ("host_slots_used", "num_requests_swapped", "swap_blocks_leaving"):
        assert samples[f"fastserve:{name}",] == 0
    assert samples["fastserve:swaps_in_flight", "out"] == samples["fastserve:swaps_in_flight", "in"] == 0
    assert samples["fastserve:enst_error_seconds_bucket", "+Inf"] == sum(swap.enst_error_counts) > 0
    for direction in ("out", "in"):
        assert samples["fastserve:swap_size_bytes_count", direction] == samples["fastserve:swaps_total", direction]
        assert samples["fastserve:swap_size_bytes_sum", direction] == samples["fastserve:swap_bytes_total", direction]
    stays = {
        (sample.name.removeprefix("fastserve:kv_"), *sample.labels.values()): sample.value
        for family in residency_families(swap.residency)
        for sample in family.samples
    }
    assert stays["device_residency_seconds_count", "finished"] + stays["host_residency_seconds_count", "finished"] <= 12
    assert stays["host_residency_seconds_count", "moved"] >= stays["reuse_gap_seconds_count",] > 0
    assert stays["host_residency_seconds_sum", "moved"] > 0
    assert stays["idle_before_evict_seconds_count",] >= samples["fastserve:swaps_total", "out"]
