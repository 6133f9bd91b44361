"""Events in, commands out: the life of a job."""

import pytest

from fastserve_scheduler.core import SchedulerCore
from fastserve_scheduler.core.commands import (
    FinishReason,
    PlanItem,
    RaiseEpoch,
    RejectJob,
    RejectReason,
    RunIteration,
)
from fastserve_scheduler.core.events import IterationDone, JobAborted, JobArrived, StageDown, StageUp, Woke

from .support import MS, PROFILE, Hand, config, finished, plans, ran, ready_core


def test_a_new_job_runs_at_once_with_its_whole_prompt() -> None:
    assert ready_core().handle(JobArrived(1, 6, 3), 0) == [
        RunIteration(0, 0, (PlanItem(1, 0, 6, sample=True, output_position=0, block_table=(0, 1)),))
    ]


def test_each_iteration_computes_the_last_known_token_and_draws_the_next() -> None:
    hand = Hand(ready_core())
    hand.tell(JobArrived(1, 3, 3))
    (second,) = plans(hand.done())
    assert second.items == (PlanItem(1, 3, 1, sample=True, output_position=1, block_table=(0,)),)
    (third,) = plans(hand.done())
    assert third.items == (PlanItem(1, 4, 1, sample=True, output_position=2, block_table=(0, 1)),)
    assert finished(hand.done()) == [(1, FinishReason.LENGTH)]
    assert hand.core.pool.num_free == 1000


def test_the_stopping_token_counts_and_ends_the_job() -> None:
    hand = Hand(ready_core())
    hand.tell(JobArrived(1, 3, 9))
    hand.done()
    assert finished(hand.done(stopped=(1,))) == [(1, FinishReason.STOP)]
    assert hand.core.snapshot().generated_tokens == 2


def test_a_job_that_comes_back_is_prefilled_with_what_it_had() -> None:
    hand = Hand(ready_core())
    (plan,) = plans(hand.tell(JobArrived(1, 5, 9, output_tokens=4)))
    assert plan.items[0].num_tokens == 9
    assert plan.items[0].output_position == 4


def test_a_job_that_comes_back_complete_is_finished_at_once() -> None:
    assert finished(ready_core().handle(JobArrived(1, 5, 4, output_tokens=4), 0)) == [(1, FinishReason.LENGTH)]


def test_an_abort_in_line_frees_at_once_and_one_in_flight_when_it_lands() -> None:
    hand = Hand(ready_core(max_batch_size=1))
    hand.tell(JobArrived(1, 5, 9))
    hand.tell(JobArrived(2, 5, 9))
    assert finished(hand.tell(JobAborted(2))) == [(2, FinishReason.ABORTED)]
    assert hand.tell(JobAborted(1)) == []
    assert hand.core.pool.num_free < 1000
    assert finished(hand.done()) == [(1, FinishReason.ABORTED)]
    assert hand.core.pool.num_free == 1000
    assert hand.tell(JobAborted(1)) == []


def test_a_result_of_no_plan_or_of_an_old_epoch_changes_nothing() -> None:
    hand = Hand(ready_core())
    hand.tell(JobArrived(1, 5, 9))
    assert hand.tell(IterationDone(7, 0, MS)) == []
    assert hand.tell(IterationDone(0, 3, MS)) == []
    assert hand.core.jobs[1].generated == 0


def test_a_lost_stage_voids_the_plans_and_jobs_are_prefilled_with_their_output() -> None:
    hand = Hand(ready_core(num_stages=2))
    hand.tell(JobArrived(1, 5, 9))
    hand.done()
    assert hand.tell(StageDown(1)) == [RaiseEpoch(1)]
    late = hand.flying.pop()
    assert hand.tell(IterationDone(late.seq, late.epoch, MS)) == []
    (plan,) = plans(hand.tell(StageUp(1, 50)))
    assert (plan.epoch, plan.items[0].start, plan.items[0].num_tokens) == (1, 0, 6)
    assert plan.items[0].output_position == 1
    assert hand.core.pool.num_blocks == 50


def test_a_job_aborted_in_flight_ends_with_the_epoch() -> None:
    hand = Hand(ready_core())
    hand.tell(JobArrived(1, 5, 9))
    hand.tell(JobAborted(1))
    commands = hand.tell(StageDown(0))
    assert commands[0] == RaiseEpoch(1)
    assert finished(commands) == [(1, FinishReason.ABORTED)]


def test_a_second_report_of_the_same_loss_or_arrival_means_nothing() -> None:
    hand = Hand(ready_core())
    hand.tell(StageDown(0))
    assert hand.tell(StageDown(0)) == []
    hand.tell(StageUp(0, 10))
    assert hand.tell(StageUp(0, 10)) == []
    assert hand.tell(StageUp(0, 11)) == [RaiseEpoch(2)]
    assert hand.core.pool.num_blocks == 11


def test_a_pool_that_comes_back_smaller_shortens_answers_instead_of_hanging() -> None:
    hand = Hand(ready_core(num_blocks=10))
    hand.tell(JobArrived(1, 20, 20))
    hand.tell(JobArrived(2, 8, 20))
    hand.tell(StageDown(0))
    commands = hand.tell(StageUp(0, 3))
    assert finished(commands) == [(1, FinishReason.LENGTH)]
    assert ran(commands) == [[2]]
    assert hand.core.jobs[2].max_output_tokens == 4


def test_before_the_first_start_jobs_are_refused_and_later_losses_only_queue_them() -> None:
    core = SchedulerCore(config(num_stages=2), PROFILE)
    (refusal,) = core.handle(JobArrived(1, 5, 5), 0)
    assert isinstance(refusal, RejectJob)
    assert refusal.reason is RejectReason.NOT_READY
    assert refusal.retry_after_ns > 0
    core.handle(StageUp(0, 10), 0)
    core.handle(StageUp(1, 20), 0)
    assert core.snapshot().blocks_total == 10
    core.handle(StageDown(1), 0)
    assert core.handle(JobArrived(1, 5, 5), 0) == []
    assert ran(core.handle(StageUp(1, 20), 0)) == [[1]]


@pytest.mark.parametrize(("total", "accepted"), [(39, True), (40, True), (41, False)])
def test_what_can_never_fit_is_refused_with_the_limit(total: int, accepted: bool) -> None:
    (command,) = ready_core(num_blocks=10).handle(JobArrived(1, total - 9, 9), 0)
    if accepted:
        assert isinstance(command, RunIteration)
    else:
        assert command == RejectJob(1, RejectReason.TOO_LONG, 0, 40)


def test_the_longest_job_that_fits_the_pool_finishes() -> None:
    hand = Hand(ready_core(num_blocks=10))
    hand.tell(JobArrived(1, 31, 9))
    for _ in range(8):
        assert finished(hand.done()) == []
    assert finished(hand.done()) == [(1, FinishReason.LENGTH)]


def test_full_queues_refuse_by_name_and_reopen() -> None:
    hand = Hand(ready_core(max_batch_size=1, max_waiting_jobs=2, max_waiting_tokens=1000))
    for job_id in (1, 2, 3):
        hand.tell(JobArrived(job_id, 400, 1))
    (refusal,) = hand.tell(JobArrived(4, 400, 1))
    assert isinstance(refusal, RejectJob)
    assert (refusal.reason, refusal.limit) == (RejectReason.QUEUE_FULL_JOBS, 2)
    assert refusal.retry_after_ns > 0
    hand.done()
    (refusal,) = hand.tell(JobArrived(4, 601, 1))
    assert isinstance(refusal, RejectJob)
    assert (refusal.reason, refusal.limit) == (RejectReason.QUEUE_FULL_TOKENS, 1000)
    assert hand.tell(JobArrived(4, 600, 1)) == []
    assert hand.core.snapshot().rejected == 2


def test_an_event_that_must_not_be_sent_is_an_error_and_changes_nothing() -> None:
    hand = Hand(ready_core())
    hand.tell(JobArrived(1, 5, 9))
    before = hand.core.snapshot()
    for event in (JobArrived(1, 5, 9), JobArrived(2, 0, 9), JobArrived(2, 5, 0), StageUp(1, 5), StageUp(0, 0)):
        with pytest.raises(ValueError, match=r"cannot be|counts|already here"):
            hand.core.handle(event, 0)
    assert hand.core.snapshot() == before


def test_a_clock_that_runs_backwards_is_taken_to_stand_still() -> None:
    core = ready_core()
    core.handle(JobArrived(1, 5, 9), 100)
    core.handle(Woke(), 50)
    core.handle(JobArrived(2, 5, 9), 60)
    assert core.jobs[2].arrived_ns == 100


def test_the_story_tells_one_job_alone() -> None:
    hand = Hand(ready_core())
    hand.tell(JobArrived(1, 5, 2))
    hand.tell(JobArrived(2, 5, 2))
    hand.done()
    hand.done()
    told = [str(moment) for moment in hand.core.story(1)]
    assert told[0] == "0 ns: arrived, joined level 0"
    assert told[-1] == "20000000 ns: finished with output tokens 2"
    assert {moment.job_id for moment in hand.core.story(1)} == {1}
    assert hand.core.story(99) == ()
