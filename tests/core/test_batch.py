"""Batch formation: slots, tokens, chunks, blocks, and the share of each stage."""

from fastserve_scheduler.core.events import JobArrived
from fastserve_scheduler.sim import simulate

from .support import MS, Hand, PerToken, mlfq, plans, ran, ready_core


def test_a_batch_takes_the_first_jobs_in_order_up_to_its_slots() -> None:
    hand = Hand(ready_core(max_batch_size=3))
    for job_id in range(1, 7):
        hand.tell(JobArrived(job_id, 5, 9))
    assert ran(hand.done()) == [[2, 3, 4]]


def test_a_prompt_that_does_not_fit_the_tokens_is_passed_over_and_runs_when_it_is_first() -> None:
    hand = Hand(ready_core(max_batch_size=4, max_batch_tokens=20, policy="fcfs", max_model_len=100))
    hand.tell(JobArrived(1, 5, 2))
    hand.tell(JobArrived(2, 40, 1))
    hand.tell(JobArrived(3, 5, 9))
    assert ran(hand.done()) == [[1]], "longer than any budget: it waits for an empty batch, nobody passes it"
    (plan,) = plans(hand.done())
    assert [(item.job_id, item.num_tokens) for item in plan.items] == [(2, 40)]


def test_mlfq_lets_what_fits_pass_what_does_not() -> None:
    hand = Hand(ready_core(max_batch_size=4, max_batch_tokens=20, max_model_len=100))
    hand.tell(JobArrived(1, 5, 9))
    hand.tell(JobArrived(2, 8, 9))
    hand.tell(JobArrived(3, 9, 9))
    hand.tell(JobArrived(4, 8, 9))
    assert ran(hand.done()) == [[2, 3, 1]]


def test_chunks_count_prompt_tokens_only_and_decodes_keep_their_slots() -> None:
    hand = Hand(ready_core(max_batch_size=4, max_batch_tokens=100, prefill_chunk_tokens=8, policy="fcfs"))
    for job_id in (1, 2, 3):
        hand.tell(JobArrived(job_id, 4, 90))
        hand.done()
    hand.tell(JobArrived(4, 50, 5))
    (plan,) = plans(hand.done())
    assert [(item.job_id, item.num_tokens, item.sample) for item in plan.items] == [
        (1, 1, True),
        (2, 1, True),
        (3, 1, True),
        (4, 8 * 4 // 3, False),
    ]
    (plan,) = plans(hand.done())
    assert (plan.items[3].start, plan.items[3].num_tokens) == (10, 10)


def test_the_chunk_grows_to_everything_when_nobody_decodes() -> None:
    hand = Hand(ready_core(max_batch_size=4, max_batch_tokens=100, prefill_chunk_tokens=8))
    (plan,) = plans(hand.tell(JobArrived(1, 250, 5)))
    assert plan.items[0].num_tokens == 32
    hand.core.check()


def test_on_a_pipeline_the_chunk_grows_for_a_lone_prompt_only() -> None:
    """A long chunk would leave the stages behind the first one idle while other prompts wait to fill them."""
    hand = Hand(ready_core(num_stages=2, max_batch_size=4, max_batch_tokens=100, prefill_chunk_tokens=8))
    (plan,) = plans(hand.tell(JobArrived(1, 250, 5)))
    assert [item.num_tokens for item in plan.items] == [32]
    (plan,) = plans(hand.tell(JobArrived(2, 250, 5)))
    assert [item.num_tokens for item in plan.items] == [8]
    (plan,) = plans(hand.done())
    assert [(item.job_id, item.num_tokens) for item in plan.items] == [(1, 8)]


def test_a_first_token_comes_with_the_last_chunk() -> None:
    hand = Hand(ready_core(max_batch_size=1, max_batch_tokens=10, prefill_chunk_tokens=4))
    hand.tell(JobArrived(1, 10, 2))
    seen = []
    while hand.flying:
        item = hand.flying[0].items[0]
        seen.append((item.start, item.num_tokens, item.sample, item.output_position))
        hand.done()
    assert seen == [(0, 4, False, 0), (4, 4, False, 0), (8, 2, True, 0), (10, 1, True, 1)]


def test_few_jobs_are_shared_out_so_that_no_stage_runs_dry() -> None:
    hand = Hand(ready_core(num_stages=2, max_batch_size=8))
    for job_id in range(1, 6):
        hand.tell(JobArrived(job_id, 5, 50))
    for _ in range(6):
        hand.done()
    assert sorted(len(plan.items) for plan in hand.flying) == [2, 3]


def test_enough_jobs_fill_every_batch() -> None:
    hand = Hand(ready_core(num_stages=2, max_batch_size=2))
    for job_id in range(1, 7):
        hand.tell(JobArrived(job_id, 5, 50))
    for _ in range(6):
        hand.done()
    assert [len(plan.items) for plan in hand.flying] == [2, 2]


def test_sharing_keeps_both_stages_busy() -> None:
    """Four equal jobs on two stages: without the share one batch of four would leave each stage idle half the time."""
    core = ready_core(num_stages=2, max_batch_size=8)
    result = simulate(core, [(0, JobArrived(job_id, 5, 200)) for job_id in range(1, 5)], PerToken(2), 500)
    assert all(busy_ns > 0.95 * result.end_ns for busy_ns in result.busy_ns)


def test_a_job_in_flight_keeps_its_queue_and_joins_no_second_batch() -> None:
    hand = Hand(ready_core(num_stages=3, max_batch_size=1))
    hand.tell(JobArrived(1, 5, 50))
    assert len(hand.flying) == 1
    snapshot = hand.core.snapshot()
    assert (snapshot.levels[0].running, snapshot.levels[0].waiting) == (1, 0)


def test_the_number_of_stages_does_not_change_who_comes_first() -> None:
    orders = []
    for stages in (1, 2, 4):
        core = ready_core(num_stages=stages, max_batch_size=1, policy="fcfs")
        arrivals = [(0, JobArrived(job_id, 5 * job_id, 4)) for job_id in range(1, 9)]
        result = simulate(core, arrivals, PerToken(stages), 500)
        orders.append([job.job_id for job in sorted(result.jobs.values(), key=lambda job: job.first_token_ns)])
    assert orders[0] == orders[1] == orders[2] == list(range(1, 9))


def test_preemptions_are_counted_by_what_was_short() -> None:
    hand = Hand(ready_core(max_batch_size=4, max_batch_tokens=10, mlfq=mlfq(alpha_ns=10**12)))
    for job_id in (1, 2):
        hand.tell(JobArrived(job_id, 5, 90))
    for _ in range(6):
        hand.done()
    hand.tell(JobArrived(3, 10, 1))
    hand.done(10 * MS)
    assert hand.core.snapshot().preemptions_tokens == 2
    assert hand.core.snapshot().preemptions_slots == 0
