"""Many rounds of everything at once: copies of any length, tiny pools, aborts at any moment; every token is checked.

A stage draws each token from all it reads back through the block table, on every stage, so KV that is garbled, stale or
another request's is a wrong token from there on. Checksums are on at both ends of every copy.
"""

import asyncio
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fastserve_worker.fake_stage import FakeOptions

from .rig import PATIENCE_S, TestGateway
from .swap_rig import SwapCluster, ask, be_quick, random_swaps

NUM_BLOCKS, NUM_SLOTS, BLOCK_SIZE = 24, 64, 16
#: Requests that are there at any time.
CONCURRENCY = 16
FULL = pytest.mark.full
#: Requests for each number of stages, and for each way to be preempted: 1024 in all.
MANY = 128

#: By time slices, as in service; and by turns: who waits at all goes before who runs, so that a request that has taken
#: a token gives way to the next, and its KV leaves at any position.
WAYS = {
    "slices": ("--policy", "skip-join-mlfq", "--alpha-ms", "30", "--quantum-ratio", "2"),
    "turns": (
        *("--policy", "skip-join-mlfq", "--alpha-ms", "0.001"),
        *("--promotion", "reset", "--demote-when", "used-reaches"),
    ),
}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    be_quick(monkeypatch)


@dataclass
class Storm:
    """Requests of up to eight blocks; `cut`: the share that is aborted at a token drawn at random."""

    gateway: TestGateway
    rng: random.Random
    cut: float
    #: A stream takes one write at a time.
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(CONCURRENCY))
    answered: int = 0
    aborted: int = 0

    async def run(self, num_requests: int) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(num_requests):
                await self.slots.acquire()
                group.create_task(self._one(number)).add_done_callback(lambda _: self.slots.release())

    async def _one(self, number: int) -> None:
        num_tokens = self.rng.randrange(20, 70)
        async with self.writing:
            answer, expected = await ask(self.gateway, number, self.rng.randrange(4, 58), num_tokens)
        if self.rng.random() < self.cut:
            await self._abort_at(self.rng.randrange(num_tokens), number)
        await asyncio.wait_for(answer.over.wait(), 4 * PATIENCE_S)
        assert answer.ids == expected[: len(answer.ids)]
        assert answer.reason in ("LENGTH", "CANCELLED")
        if answer.reason == "LENGTH":
            assert answer.ids == expected
            self.answered += 1
        else:
            self.aborted += 1
        del self.gateway.answers[f"{number}"]

    async def _abort_at(self, num_tokens: int, number: int) -> None:
        """When it has so many, wherever its KV is then; or soon after."""
        answer = self.gateway.answers[f"{number}"]
        while len(answer.ids) < num_tokens and not answer.over.is_set():  # noqa: ASYNC110 - tokens come one by one
            await asyncio.sleep(0.001)
        async with self.writing:
            await self.gateway.cancel(f"{number}")


async def weather(folder: Path, num_stages: int, policy: str, way: str, num_requests: int, cut: float) -> None:
    """The rig looks at the ledgers of scheduler and kvstore at the end."""
    rng = random.Random(f"{num_stages} {policy} {way}")
    options = FakeOptions(
        iteration_ns=100_000, token_ns=1_000, swap_delays_ns=random_swaps(rng, 50 * num_requests, 6_000_000)
    )
    flags = ["--kv-policy", policy, "--max-num-seqs", "3", *WAYS[way]]
    async with SwapCluster(
        folder,
        num_stages,
        num_blocks=NUM_BLOCKS,
        num_slots=NUM_SLOTS,
        block_size=BLOCK_SIZE,
        options=options,
        flags=flags,
        checksums=True,
        tight=True,
    ) as cluster:
        storm = Storm(await cluster.gateway(), rng, cut)
        await storm.run(num_requests)
        assert storm.answered + storm.aborted == num_requests
        assert storm.answered > num_requests / 3
        assert (storm.aborted > 0) == (cut > 0)
        state = await cluster.state()
        assert state.swaps_out > num_requests / 2
        assert state.swaps_in > num_requests / 4


@pytest.mark.parametrize(
    ("num_stages", "policy"),
    [
        (2, "proactive"),
        *(pytest.param(stages, policy, marks=FULL) for stages in (1, 2, 3, 4) for policy in ("proactive", "reactive")),
    ],
)
async def test_sixteen_at_once_get_the_oracles_tokens(tmp_path: Path, num_stages: int, policy: str) -> None:
    """Copies taken too early or landing too late garble KV without any error (vllm #45704, #47282; sglang #33547)."""
    await weather(tmp_path, num_stages, policy, "slices", CONCURRENCY, cut=0.0)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
async def test_a_thousand_requests_get_the_oracles_tokens_or_are_aborted_at_any_moment(
    tmp_path: Path, num_stages: int, way: str
) -> None:
    policy = "proactive" if num_stages % 2 else "reactive"
    await weather(tmp_path, num_stages, policy, way, MANY, cut=0.3)


async def test_a_few_requests_that_take_turns_and_are_aborted(tmp_path: Path) -> None:
    """The same, short."""
    await weather(tmp_path, 2, "proactive", "turns", 20, cut=0.3)
