"""Faults that other serving systems had, played against the simulator."""

import random

import pytest

from fastserve_scheduler.core import SchedulerCore
from fastserve_scheduler.core.events import Event, IterationDone, JobAborted, JobArrived
from fastserve_scheduler.core.kv import KV_POLICIES
from fastserve_scheduler.core.policies import POLICIES
from fastserve_scheduler.sim import Simulator, simulate

from .support import MS, PROFILE, Hand, PerToken, config, mlfq, ready_core

#: What the four long jobs are run out of: batch slots, batch tokens, device blocks.
SHORTAGES: dict[str, tuple[dict[str, int], int]] = {
    "slots": ({"max_batch_size": 4}, 1000),
    "tokens": ({"max_batch_size": 8, "max_batch_tokens": 9}, 1000),
    "blocks": ({"max_batch_size": 8}, 30),
}


@pytest.mark.parametrize("policy", ["skip-join-mlfq", "fixed-priority"])
@pytest.mark.parametrize("shortage", list(SHORTAGES))
def test_an_urgent_job_waits_for_no_long_one_whatever_is_short(policy: str, shortage: str) -> None:
    """Four jobs that will run for long are 20 tokens in; the urgent one has its first token within three iterations."""
    changes, num_blocks = SHORTAGES[shortage]
    core = SchedulerCore(config(policy=policy, **changes), PROFILE)
    arrivals: list[tuple[int, Event]] = [(0, JobArrived(number, 8, 80, priority=1)) for number in range(1, 5)]
    arrivals.append((260 * MS, JobArrived(9, 8, 8, priority=0)))
    result = simulate(core, arrivals, PerToken(), num_blocks)
    urgent = result.jobs[9]
    assert min(result.jobs[number].finished_ns for number in range(1, 5)) > urgent.arrived_ns
    assert urgent.first_token_ns - urgent.arrived_ns <= 3 * 10 * MS
    assert [job.output_tokens for job in result.jobs.values()] == [80, 80, 80, 80, 8]


def test_an_endless_stream_at_the_top_does_not_starve_the_jobs_below() -> None:
    """The top queue gets 10 % more than the machine can do, for 60 s; five large prompts wait below from the start."""
    alpha_ns = 1000 * MS
    core = SchedulerCore(
        config(max_batch_size=2, max_model_len=400, max_batch_tokens=400, mlfq=mlfq(alpha_ns=alpha_ns)), PROFILE
    )
    low = range(1, 6)
    arrivals: list[tuple[int, Event]] = [(0, JobArrived(10, 9, 1))]
    arrivals += [(1, JobArrived(number, 200, 20)) for number in low]
    between_ns = 9 * MS * 10 // 11
    arrivals += [(between_ns * number, JobArrived(100 + number, 9, 1)) for number in range(60_000 * MS // between_ns)]
    tickets_before_alpha: list[int] = []

    def watch(now_ns: int, plan: object) -> None:
        if now_ns < alpha_ns:
            tickets_before_alpha.extend(job.job_id for job in core.jobs.values() if job.ticket)

    result = Simulator(core, PerToken(), watch=watch).run(arrivals, 1000)
    assert tickets_before_alpha == [], "a job that never ran has waited since its arrival, not since the epoch"
    for number in low:
        job = result.jobs[number]
        assert job.first_token_ns - job.arrived_ns <= alpha_ns + 5 * 220 * MS
        assert job.output_tokens == 20
        # Beyond capacity everybody's wait grows: at the end 10 % of 60 s of work is left over and waits in turn.
        assert job.max_gap_ns <= 2 * alpha_ns + 6000 * MS + 5 * 220 * MS
    assert core.snapshot().tickets >= 5


@pytest.mark.parametrize("kv_policy", list(KV_POLICIES))
@pytest.mark.parametrize("policy", list(POLICIES))
def test_no_plan_contains_its_own_victim_in_a_long_random_run(policy: str, kv_policy: str) -> None:
    random_ = random.Random(11)
    core = ready_core(
        num_blocks=24, num_stages=2, max_batch_size=4, max_model_len=60, policy=policy, kv_policy=kv_policy
    )
    hand = Hand(core)
    for number in range(1, 120):
        hand.tell(JobArrived(number, random_.randint(1, 40), random_.randint(1, 20), priority=random_.randint(0, 2)))
        if random_.random() < 0.2:
            hand.tell(JobAborted(random_.randint(1, number)))
        for _ in range(random_.randint(0, 6)):
            if hand.flying:
                for item in hand.flying[0].items:
                    assert core.jobs[item.job_id].table.block_ids == item.block_table
                hand.done(random_.randint(1, 30) * MS)
    while hand.flying:
        hand.done()
    assert core.pool.num_free == 24


def test_one_huge_prompt_in_chunks_does_not_block_the_first_tokens_of_short_ones() -> None:
    huge = JobArrived(1, 900, 20)
    short = [JobArrived(number, 16, 20) for number in range(2, 12)]
    alone = simulate(_chunked(), [(0, short[0])], PerToken(), 1000).jobs[2]
    huge_alone = simulate(_chunked(), [(0, huge)], PerToken(), 1000).jobs[1]
    arrivals: list[tuple[int, Event]] = [(0, huge), *((20 * MS, event) for event in short)]
    together = simulate(_chunked(), arrivals, PerToken(), 1000)
    waits = sorted(together.jobs[event.job_id].first_token_ns - 20 * MS for event in short)
    # Ten prompts of 16 ms are 160 ms of work by themselves.
    assert waits[-1] <= 160 * MS + 5 * (alone.first_token_ns - alone.arrived_ns)
    assert together.jobs[1].latency_ns <= 1.5 * huge_alone.latency_ns


def _chunked() -> SchedulerCore:
    return SchedulerCore(
        config(max_batch_size=16, max_batch_tokens=64, prefill_chunk_tokens=32, max_model_len=1000), PROFILE
    )


def test_a_result_counts_once_whenever_a_job_is_preempted_in_flight() -> None:
    """Abort or lose a stage at every moment of a job's life: no token twice, none missing."""
    for moment in range(1, 24):
        hand = Hand(ready_core(num_stages=2, num_blocks=12, max_batch_size=1))
        hand.tell(JobArrived(1, 6, 20))
        hand.tell(JobArrived(2, 6, 20))
        positions: list[int] = []
        for step in range(200):
            if step == moment:
                hand.tell(JobArrived(3, 5, 4))
                hand.tell(JobAborted(2))
            if not hand.flying:
                break
            positions += [item.output_position for item in hand.flying[0].items if item.job_id == 1 and item.sample]
            stale = hand.flying[0]
            hand.done()
            assert hand.core.handle(IterationDone(stale.seq, stale.epoch, MS, (1,)), hand.now_ns) == []
        assert positions == list(range(20))
