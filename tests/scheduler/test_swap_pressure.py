"""A device of 24 blocks and a host of 64, in simulated time: requests that take each other's memory, and slow copies.

What other engines did here: freeze for good, because copies that had landed belonged to requests behind the one that
needed their blocks (vllm #45388, #45387); resume what is evicted again in the next step, and stay many times slower
after the first eviction (vllm #25538, sglang #26248).
"""

import itertools
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

import pytest
from tests.core.support import MS, PROFILE, PerToken, config, mlfq

from fastserve_scheduler.core import SchedulerCore
from fastserve_scheduler.core.commands import RunIteration, SwapDirection
from fastserve_scheduler.core.events import JobArrived
from fastserve_scheduler.sim import LinkCost, Result, Simulator

BLOCK_SIZE, NUM_BLOCKS, NUM_SLOTS, NUM_STAGES = 16, 24, 64, 2
AMPLE_BLOCKS = 1000
BLOCK_BYTES = 100
OUT, IN = SwapDirection.OUT, SwapDirection.IN

SWAPPING = pytest.mark.parametrize("kv_policy", ["proactive", "reactive"])
#: As many running batches as the pool must hold before anybody is displaced; 2 is what is shipped.
ROOM = pytest.mark.parametrize("min_batches", [0, 1])


@dataclass
class Played:
    """One run, and what was seen at the start of every plan."""

    core: SchedulerCore
    result: Result
    #: Plans as they started, with the time.
    plans: list[tuple[int, RunIteration]] = field(default_factory=list)

    def swaps(self, direction: SwapDirection) -> list[tuple[int, int, int]]:
        """(number of the plan, time, job) of each."""
        return [
            (number, at_ns, op.job_id)
            for number, (at_ns, plan) in enumerate(self.plans)
            for op in plan.swaps
            if op.direction is direction
        ]

    def preemptions(self) -> Counter[int]:
        """How often each job lost its KV and went on: as clients are told."""
        count = Counter(job_id for _, _, job_id in self.swaps(IN))
        computed: dict[int, int] = {}
        for _, plan in self.plans:
            for item in plan.items:
                count[item.job_id] += item.start < computed.get(item.job_id, 0)
                computed[item.job_id] = item.start + item.num_tokens
        return count

    def tokens_per_s_in_the_last_third(self) -> float:
        """Of the time, by when their iterations began."""
        begin_ns = self.result.end_ns * 2 // 3
        tokens = sum(item.sample for at_ns, plan in self.plans if at_ns >= begin_ns for item in plan.items)
        return tokens * 1e9 / (self.result.end_ns - begin_ns)

    def longest_pause_ns(self) -> int:
        """Between the starts of two plans, while there was work to do."""
        starts = [at_ns for at_ns, _ in self.plans]
        return max(after - before for before, after in itertools.pairwise(starts))


def play(
    arrivals: list[tuple[int, JobArrived]], swap_ms: int, num_blocks: int = NUM_BLOCKS, **changes: object
) -> Played:
    settings = {
        "num_stages": NUM_STAGES,
        "block_size": BLOCK_SIZE,
        "max_batch_size": 4,
        "max_model_len": NUM_BLOCKS * BLOCK_SIZE,
        "mlfq": mlfq(alpha_ns=10_000 * MS),
        **changes,
    }
    core = SchedulerCore(config(**settings), PROFILE)
    plans: list[tuple[int, RunIteration]] = []
    simulator = Simulator(
        core,
        PerToken(NUM_STAGES),
        check=True,
        keep_log=True,
        watch=lambda now_ns, plan: plans.append((now_ns, plan)),
        link=LinkCost(block_bytes=BLOCK_BYTES, latency_ns=swap_ms * MS),
    )
    return Played(core, simulator.run(arrivals, num_blocks, host_slots=NUM_SLOTS), plans)


def alone_ns(event: JobArrived) -> int:
    """With a huge pool and nobody else."""
    return play([(0, event)], 0, AMPLE_BLOCKS).result.end_ns


@SWAPPING
@ROOM
def test_copies_on_their_way_to_the_back_of_the_line_do_not_freeze_its_head(min_batches: int, kv_policy: str) -> None:
    """Three requests of 7 blocks go to the host for a prompt of 22; when they are on their way back, 200 ms each,
    another one comes to the head of the line. The blocks that it needs are theirs, and they stand behind it."""
    low = [JobArrived(number, 100, 60, priority=1) for number in (1, 2, 3)]
    first, second = (JobArrived(number, 350, 2, priority=0) for number in (4, 5))
    rush = partial(play, policy="fixed-priority", kv_policy=kv_policy, swap_min_batches=min_batches)
    arrivals = [(MS, event) for event in low] + [(310 * MS, first)]
    before = rush(arrivals, 200)
    assert {job_id for _, _, job_id in before.swaps(OUT)} == {1, 2, 3}, "all of them were on the host"
    coming_back_ns = before.swaps(IN)[0][1]
    played = rush([*arrivals, (coming_back_ns + 50 * MS, second)], 200)
    assert any(at_ns == coming_back_ns for _, at_ns, _ in played.swaps(IN)), "a copy was under way when it came"
    jobs = played.result.jobs
    assert [job.output_tokens for job in jobs.values()] == [60, 60, 60, 2, 2]
    assert played.result.end_ns <= 10 * sum(alone_ns(event) for event in (*low, first, second))
    # While a copy is awaited nothing can start; but that is one copy, and then something does.
    assert played.longest_pause_ns() <= 2 * 200 * MS + 350 * MS
    assert played.core.pool.num_free == NUM_BLOCKS
    assert played.core.tiers.host.num_free == NUM_SLOTS


@SWAPPING
@ROOM
def test_requests_that_do_not_fit_together_do_not_chase_each_other_out(min_batches: int, kv_policy: str) -> None:
    """Six requests with prompts of 6 blocks and answers of 200 tokens, copies of 100 ms: a few preemptions each, never
    two in a row, and at the end at most 30 % slower than requests that were never preempted.

    These are the same ones in the same memory under `defer`, which begins a request only when it can be finished. With
    ample memory all six run in one batch, for the price of one: no pool of 24 blocks can do that."""
    arrivals = [(number * MS, JobArrived(number, 6 * BLOCK_SIZE, 200)) for number in range(1, 7)]
    played = play(arrivals, 100, max_batch_size=6, kv_policy=kv_policy, swap_min_batches=min_batches)
    calm = play(arrivals, 100, max_batch_size=6, kv_policy="defer")
    for run in (played, calm):
        assert [job.output_tokens for job in run.result.jobs.values()] == [200] * 6
    assert not calm.swaps(OUT)
    assert calm.core.snapshot().preemptions_blocks == 0
    assert max(played.preemptions().values()) <= 4
    assert played.core.snapshot().preemptions_blocks > 0
    left: dict[int, int] = {}
    for number, _, job_id in played.swaps(OUT):
        assert number > left.get(job_id, -2) + 1, "preempted in two consecutive steps"
        left[job_id] = number
    assert played.tokens_per_s_in_the_last_third() >= 0.7 * calm.tokens_per_s_in_the_last_third()
    working_set_blocks = 6 * -(-(6 * BLOCK_SIZE + 200) // BLOCK_SIZE)
    moved = played.core.snapshot().swap.bytes_out
    assert 0 < moved <= 2 * working_set_blocks * BLOCK_BYTES * NUM_STAGES
