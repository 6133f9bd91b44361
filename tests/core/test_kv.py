"""Blocks short: who gives way, what it costs, and that the first in the order always runs."""

from fastserve_scheduler.core.events import JobArrived, StageDown, StageUp
from fastserve_scheduler.sim import simulate

from .support import MS, Hand, PerToken, mlfq, plans, ran, ready_core


def _grown_until_job_2_is_evicted() -> Hand:
    """Five blocks, two jobs of two blocks: job 1 takes the fifth, and then needs a sixth."""
    hand = Hand(ready_core(num_blocks=5, policy="fcfs"))
    hand.tell(JobArrived(1, 7, 9))
    hand.tell(JobArrived(2, 7, 9))
    seen = [ran(hand.done())[0] for _ in range(7)]
    assert seen == [[1, 2], [1, 2], [1], [1], [1], [1], [1]]
    return hand


def test_the_last_in_the_order_loses_its_blocks_when_a_job_grows() -> None:
    hand = _grown_until_job_2_is_evicted()
    assert hand.core.snapshot().preemptions_blocks == 2, "once passed over for a block, once evicted"
    assert hand.core.jobs[2].computed == 0
    assert len(hand.core.jobs[1].table) == 4


def test_an_evicted_job_is_prefilled_again_with_its_output_and_the_work_is_counted() -> None:
    hand = _grown_until_job_2_is_evicted()
    while 1 in hand.core.jobs:
        hand.done()
    again = hand.flying[0].items[0]
    assert (again.job_id, again.start, again.num_tokens, again.output_position) == (2, 0, 9, 2)
    assert hand.core.snapshot().recomputed_tokens == 8


def test_a_new_job_of_a_higher_queue_takes_the_blocks_of_a_lower_one() -> None:
    hand = Hand(ready_core(num_blocks=6))
    hand.tell(JobArrived(1, 15, 9))
    for _ in range(3):
        hand.done()
    hand.tell(JobArrived(2, 9, 3))
    assert ran(hand.done()) == [[2]]
    assert hand.core.snapshot().preemptions_blocks == 1


def test_of_equal_level_the_job_that_has_kv_keeps_it() -> None:
    """A has KV and waits; B came to the same queue before it, has none, and there are no blocks: nobody recomputes."""
    hand = Hand(ready_core(num_blocks=5, max_batch_size=1))
    hand.tell(JobArrived(1, 9, 3))
    hand.tell(JobArrived(2, 12, 1))
    hand.done()
    job_a, job_b = hand.core.jobs[1], hand.core.jobs[2]
    assert job_a.level == job_b.level == 1
    assert job_b.place < job_a.place
    order = [hand.flying[0].items[0].job_id, *(ran(hand.done())[0][0] for _ in range(2))]
    assert order == [1, 1, 2]
    assert hand.core.snapshot().recomputed_tokens == 0
    assert hand.core.snapshot().preemptions_blocks == 0


def test_a_preempted_job_keeps_its_place_before_jobs_that_never_ran() -> None:
    hand = Hand(ready_core(num_blocks=6, max_batch_size=1))
    hand.tell(JobArrived(1, 15, 9))
    hand.tell(JobArrived(2, 12, 9))
    hand.tell(JobArrived(3, 9, 1))
    assert ran(hand.done(15 * MS)) == [[3]]
    assert not hand.core.jobs[1].resident
    (plan,) = plans(hand.done())
    assert (plan.items[0].job_id, plan.items[0].num_tokens) == (1, 16)


def test_a_newcomer_leaves_a_block_for_each_job_ahead_or_stays_out() -> None:
    """Without the spare block job 2 would come in and be evicted again by the next token of job 1."""
    hand = Hand(ready_core(num_blocks=4, policy="fcfs"))
    hand.tell(JobArrived(1, 8, 8))
    hand.tell(JobArrived(2, 8, 8))
    while hand.flying:
        hand.done()
    assert hand.core.snapshot().preemptions_blocks == 0
    assert hand.core.snapshot().recomputed_tokens == 0


def test_defer_evicts_nobody_and_starts_a_job_only_when_its_longest_answer_fits() -> None:
    hand = Hand(ready_core(num_blocks=6, kv_policy="defer"))
    hand.tell(JobArrived(1, 8, 8))
    hand.tell(JobArrived(2, 4, 8))
    assert len(hand.flying[0].items[0].block_table) == 4
    for _ in range(8):
        assert hand.core.jobs[2].generated == 0
        hand.done()
    assert hand.flying[0].items[0].job_id == 2
    assert hand.core.snapshot().preemptions_blocks == 0


def test_two_jobs_that_each_need_the_whole_pool_both_finish() -> None:
    for kv_policy in ("recompute", "defer"):
        for stages in (1, 2, 3):
            core = ready_core(num_blocks=6, num_stages=stages, kv_policy=kv_policy, mlfq=mlfq(alpha_ns=30 * MS))
            arrivals = [(0, JobArrived(job_id, 12, 12)) for job_id in (1, 2)]
            result = simulate(core, arrivals, PerToken(stages), 6)
            assert [job.output_tokens for job in result.finished()] == [12, 12]


def test_all_kv_is_lost_with_a_stage_and_the_pool_is_whole_again() -> None:
    hand = Hand(ready_core(num_stages=2, max_batch_size=1))
    for job_id in (1, 2, 3):
        hand.tell(JobArrived(job_id, 9, 9))
    hand.done()
    hand.tell(StageDown(0))
    assert hand.core.pool.num_free == 1000
    assert all(job.computed == 0 for job in hand.core.jobs.values())
    again = plans(hand.tell(StageUp(0, 1000)))
    assert all(plan.items[0].start == 0 for plan in again)
