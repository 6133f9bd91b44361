"""A request that is given up in any state gives back every block and slot, once (sglang #18701, vllm #46283)."""

import gc
from pathlib import Path

import psutil
import pytest

from fastserve_worker.fake_stage import FakeOptions

from .rig import TestGateway, until_async
from .swap_rig import SwapCluster, ask, be_quick
from .swap_states import CHUNK_TOKENS, ITERATION_NS, STATES, Asked, swap_cluster

CHUNKED = ("--max-num-batched-tokens", f"{CHUNK_TOKENS}", "--prefill-chunk-tokens", f"{CHUNK_TOKENS}")
#: Of a deadline that passed the scheduler hears as of a client that cancels.
WAYS = ("cancel", "disconnect")

REPETITIONS = 200
#: A repetition leaks nothing; a request's bookkeeping, prompt and answer are a few KB.
MOST_GROWTH_BYTES = 8 << 20


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    be_quick(monkeypatch)


async def abort_in(state: str, by: str, cluster: SwapCluster, gateway: TestGateway) -> Asked:
    """Those that were asked for; the first is aborted in `state`, and nobody is waited for longer than needed."""
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
    return asked


@pytest.mark.parametrize("by", WAYS)
@pytest.mark.parametrize("state", STATES)
async def test_an_abort_gives_back_every_block_and_slot(tmp_path: Path, state: str, by: str) -> None:
    """The rig looks at the ledgers at the end; that of the kvstore too."""
    async with swap_cluster(tmp_path, *CHUNKED) as cluster:
        await abort_in(state, by, cluster, await cluster.gateway())
        answer, expected = await ask(await cluster.gateway("other"), 9, 20, 10)
        assert (await answer.done()).ids == expected


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("by", WAYS)
@pytest.mark.parametrize("state", STATES)
async def test_an_abort_while_every_copy_takes_half_a_second(tmp_path: Path, state: str, by: str) -> None:
    """Late copies of requests that are no more land, and what they wrote to is given back then."""
    options = FakeOptions(iteration_ns=ITERATION_NS, token_ns=1_000, swap_ns=500_000_000)
    async with swap_cluster(tmp_path, *CHUNKED, "--swap-timeout", "20", options=options) as cluster:
        await abort_in(state, by, cluster, await cluster.gateway())


@pytest.mark.full
@pytest.mark.timeout(1800)
async def test_two_hundred_aborts_leave_nothing_behind(tmp_path: Path) -> None:
    """Every state and every way in turn, all in one cluster, whose memory does not grow."""
    process = psutil.Process()
    async with swap_cluster(tmp_path, *CHUNKED) as cluster:
        settled_bytes = 0
        for number in range(REPETITIONS):
            state, by = list(STATES)[number % len(STATES)], WAYS[number // len(STATES) % len(WAYS)]
            gateway = await cluster.gateway(f"gw-{number}")
            asked = await abort_in(state, by, cluster, gateway)
            await until_async(cluster.ledger_is_clean)
            await gateway.close()
            cluster.gateways.clear()
            cluster.script.begun.clear()
            cluster.script.it += len(asked)
            gc.collect()
            if number == REPETITIONS // 4:
                settled_bytes = process.memory_info().rss
        assert process.memory_info().rss - settled_bytes < MOST_GROWTH_BYTES
