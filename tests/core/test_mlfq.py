"""Skip-join MLFQ: where a job joins, when it falls, how it is rescued."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve_scheduler.core import Profile
from fastserve_scheduler.core.config import DemoteWhen
from fastserve_scheduler.core.events import IterationDone, JobArrived, ProfileUpdated, StageDown, StageUp, Woke
from fastserve_scheduler.core.lengths import Lengths
from fastserve_scheduler.core.policies.skip_join_mlfq import SkipJoinMlfq
from fastserve_scheduler.core.prediction import Predictor

from .support import MS, PROFILE, Hand, config, mlfq, ran, ready_core


@given(prompt=st.integers(1, 900), q1_ms=st.integers(1, 50), ratio=st.integers(2, 4))
def test_a_job_joins_the_highest_queue_that_covers_its_first_iteration(prompt: int, q1_ms: int, ratio: int) -> None:
    profile = Profile(PROFILE.prefill, ((1, 1, q1_ms * MS),))
    core = ready_core(profile=profile, mlfq=mlfq(ratio=ratio))
    core.handle(JobArrived(1, prompt, 5), 0)
    level, quanta = core.jobs[1].level, core.snapshot().quantum_ns
    t_init_ns = prompt * MS
    assert quanta[level] >= t_init_ns
    assert level == 0 or quanta[level - 1] < t_init_ns


@pytest.mark.parametrize("max_model_len", [10, 1000, 100_000])
def test_there_are_queues_for_the_longest_prompt(max_model_len: int) -> None:
    order = SkipJoinMlfq(config(max_model_len=max_model_len), Predictor(PROFILE), Lengths())
    assert order.quantum_ns[0] == 10 * MS
    assert order.quantum_ns[-1] >= PROFILE.prefill_ns(max_model_len)


@pytest.mark.parametrize(
    ("rule", "iterations"),
    [("used-reaches", 2), ("used-exceeds", 3), ("next-would-exceed", 2)],
)
def test_a_job_falls_when_its_quantum_is_used_up(rule: DemoteWhen, iterations: int) -> None:
    hand = Hand(ready_core(mlfq=mlfq(demote_when=rule, eta=2)))
    hand.tell(JobArrived(1, 11, 50))
    for _ in range(iterations - 1):
        assert hand.core.jobs[1].level == 1
        hand.done(10 * MS)
    hand.done(10 * MS)
    assert (hand.core.jobs[1].level, hand.core.jobs[1].used_ns) == (3, 0)
    assert hand.core.snapshot().demotions[1] == 1


def test_demotions_grow_with_the_logarithm_of_the_output() -> None:
    hand = Hand(ready_core())
    hand.tell(JobArrived(1, 5, 900))
    for _ in range(899):
        hand.done()
    assert sum(hand.core.snapshot().demotions) <= math.log2(900)


def test_the_last_queue_is_served_in_turns() -> None:
    hand = Hand(ready_core(max_batch_size=1, mlfq=mlfq(num_levels=1)))
    hand.tell(JobArrived(1, 5, 9))
    hand.tell(JobArrived(2, 5, 9))
    assert ran(hand.done()) == [[2]]
    assert ran(hand.done()) == [[1]]


def test_a_new_short_job_passes_all_demoted_ones_between_two_tokens() -> None:
    hand = Hand(ready_core(max_batch_size=2))
    hand.tell(JobArrived(1, 5, 90))
    hand.tell(JobArrived(2, 5, 90))
    for _ in range(6):
        hand.done()
    hand.tell(JobArrived(3, 5, 1))
    assert 3 in ran(hand.done())[0]
    assert hand.core.snapshot().preemptions_slots >= 1


def _two_jobs(**changes: object) -> Hand:
    """Job 1 has run down to a low queue, job 2 has just come; one runs at a time."""
    hand = Hand(ready_core(max_batch_size=1, mlfq=mlfq(**changes)))
    hand.tell(JobArrived(1, 5, 90))
    for _ in range(4):
        hand.done()
    hand.tell(JobArrived(2, 100, 90))
    return hand


def test_reset_lifts_a_starving_job_to_the_top_with_a_fresh_quantum() -> None:
    hand = _two_jobs(alpha_ns=100 * MS)
    hand.tell(JobArrived(3, 5, 90))
    hand.done()
    level = hand.core.jobs[1].level
    assert level > 0
    for _ in range(20):
        hand.done()
        if hand.core.jobs[1].level == 0:
            break
    assert hand.core.jobs[1].used_ns == 0
    snapshot = hand.core.snapshot()
    assert sum(snapshot.promotions_by_level[1:]) >= 1
    assert sum(snapshot.promotions_by_level) == snapshot.promotions


def test_return_gives_one_token_and_the_place_at_the_front_of_its_own_queue() -> None:
    hand = Hand(ready_core(max_batch_size=1, mlfq=mlfq(alpha_ns=100 * MS, promotion="return")))
    hand.tell(JobArrived(1, 5, 90))
    for _ in range(4):
        hand.done()
    hand.tell(JobArrived(2, 5, 90))
    job = hand.core.jobs[1]
    level, used_ns, generated = job.level, job.used_ns, job.generated
    hand.tell(Woke(), hand.now_ns + 1)
    while not job.ticket and job.generated == generated:
        hand.tell(JobArrived(100 + len(hand.core.jobs), 5, 1))
        hand.done()
    assert job.level == level, "a ticket leaves the level alone"
    while job.generated == generated:
        hand.done()
    assert not job.ticket
    assert (job.level, job.used_ns) in ((level, used_ns + 10 * MS), (level + 1, 0))
    if job.level == level:
        assert min(other.place for other in hand.core.jobs.values() if other.level == level) == job.place


def test_a_job_without_a_first_token_is_never_lifted_above_the_queue_it_joined() -> None:
    hand = Hand(ready_core(max_batch_size=1, mlfq=mlfq(alpha_ns=50 * MS)))
    hand.tell(JobArrived(1, 5, 90))
    hand.tell(JobArrived(2, 100, 90))
    job = hand.core.jobs[2]
    joined = job.level
    assert joined > 0
    for number in range(10, 90):
        if job.started:
            break
        assert job.level == joined
        hand.tell(JobArrived(number, 5, 1))
        hand.done()
    assert job.started, "it starved behind the top queue"
    assert hand.core.snapshot().tickets == 1


def test_the_clock_of_a_job_that_never_ran_starts_at_its_arrival() -> None:
    hand = Hand(ready_core(max_batch_size=1, mlfq=mlfq(alpha_ns=100 * MS)))
    hand.tell(JobArrived(1, 5, 90), 5000 * MS)
    hand.tell(JobArrived(2, 100, 90), 5000 * MS)
    hand.tell(Woke(), 5099 * MS)
    assert not hand.core.jobs[2].ticket
    hand.tell(Woke(), 5100 * MS)
    assert hand.core.jobs[2].ticket


def test_each_class_has_its_own_alpha_and_an_unknown_one_the_default() -> None:
    classes = (("gold", 20 * MS), ("bronze", 500 * MS))
    hand = Hand(ready_core(max_batch_size=1, service_classes=classes, mlfq=mlfq(alpha_ns=100 * MS)))
    hand.tell(JobArrived(1, 5, 90))
    for job_id, name in ((2, "bronze"), (3, ""), (4, "gold"), (5, "nobody's")):
        hand.tell(JobArrived(job_id, 100, 9, service_class=name))
    holders = []
    for at_ms in (19, 20, 99, 100, 499, 500):
        hand.tell(Woke(), at_ms * MS)
        holders.append([job.job_id for job in hand.core.jobs.values() if job.ticket])
    assert holders == [[], [4], [4], [3, 4, 5], [3, 4, 5], [2, 3, 4, 5]]


def test_time_without_stages_is_not_starvation() -> None:
    hand = Hand(ready_core(max_batch_size=1, mlfq=mlfq(alpha_ns=100 * MS)))
    hand.tell(JobArrived(1, 5, 90))
    hand.tell(JobArrived(2, 100, 90))
    hand.tell(StageDown(0), 10 * MS)
    hand.tell(StageUp(0, 100), 5000 * MS)
    assert not hand.core.jobs[2].ticket
    hand.tell(Woke(), 5100 * MS)
    assert hand.core.jobs[2].ticket


def test_a_new_profile_changes_the_quanta_and_takes_no_level_away() -> None:
    core = ready_core()
    before = core.snapshot().quantum_ns
    core.handle(ProfileUpdated(Profile(PROFILE.prefill, ((1, 1, 500 * MS),))), 0)
    after = core.snapshot().quantum_ns
    assert after[0] == 500 * MS
    assert len(after) >= len(before)


def test_prefill_predictions_learn_from_what_was_seen_within_bounds() -> None:
    hand = Hand(ready_core())
    for job_id in range(1, 200):
        hand.tell(JobArrived(job_id, 100, 1))
        hand.done(300 * MS)
    assert 2.8 < hand.core.snapshot().prefill_correction <= 3.0
    hand.tell(JobArrived(900, 100, 1))
    assert hand.core.story(900)[0].detail == 5, "300 ms, not 100: it skips two queues more"
    hand.done(100_000 * MS)
    assert hand.core.snapshot().prefill_correction <= 8


def test_a_wrong_profile_changes_the_order_and_nothing_else() -> None:
    outputs = []
    for factor in (1, 2):
        prefill = tuple((tokens, ns * factor) for tokens, ns in PROFILE.prefill)
        hand = Hand(ready_core(max_batch_size=1, profile=Profile(prefill, PROFILE.decode)))
        for job_id in range(1, 6):
            hand.tell(JobArrived(job_id, 15 * job_id, 3))
        order = []
        while hand.flying:
            order += [item.job_id for item in hand.flying[0].items]
            hand.done()
        outputs.append(order)
    assert outputs[0] != outputs[1]
    assert sorted(outputs[0]) == sorted(outputs[1])


def test_naive_mlfq_that_cuts_first_iterations_throws_their_work_away() -> None:
    hand = Hand(ready_core(policy="naive-mlfq", mlfq=mlfq(overrun="abort")))
    hand.tell(JobArrived(1, 35, 2))
    for level in (0, 1):
        (plan,) = hand.flying
        assert (plan.items[0].start, plan.items[0].num_tokens, plan.items[0].sample) == (0, 35, False)
        assert hand.core.jobs[1].level == level
        hand.done(35 * MS)
        assert hand.core.jobs[1].generated == 0
    assert hand.flying[0].items[0].sample, "40 ms cover it"
    assert hand.core.snapshot().recomputed_tokens == 70


def test_results_of_other_policies_come_in_their_order() -> None:
    orders = {}
    for policy in ("fcfs", "round-robin", "fixed-priority", "srpt"):
        hand = Hand(ready_core(max_batch_size=1, policy=policy))
        hand.tell(JobArrived(9, 5, 1))
        hand.tell(JobArrived(1, 30, 2, priority=1, oracle_output_tokens=2))
        hand.tell(JobArrived(2, 20, 4, priority=0, oracle_output_tokens=4))
        hand.tell(JobArrived(3, 10, 9, priority=0, oracle_output_tokens=9))
        order = []
        while hand.flying:
            order.append(hand.flying[0].items[0].job_id)
            hand.done()
        orders[policy] = order[1:]
    assert orders["fcfs"] == [1] * 2 + [2] * 4 + [3] * 9
    assert orders["round-robin"] == [1, 2, 3] * 2 + [2, 3] * 2 + [3] * 5
    assert orders["fixed-priority"] == [3] * 9 + [2] * 4 + [1] * 2
    assert orders["srpt"] == [1] * 2 + [2] * 4 + [3] * 9


def test_batch_fcfs_lets_nobody_join_a_batch_that_runs() -> None:
    hand = Hand(ready_core(max_batch_size=2, policy="batch-fcfs"))
    hand.tell(JobArrived(1, 5, 1))
    hand.tell(JobArrived(2, 5, 3))
    hand.tell(JobArrived(3, 5, 1))
    assert ran(hand.done()) == [[2, 3]]
    hand.tell(JobArrived(4, 5, 9))
    assert [ran(hand.done()) for _ in range(3)] == [[[2]], [[2]], [[4]]]


def test_a_late_iteration_is_charged_and_demoted_and_nothing_breaks() -> None:
    hand = Hand(ready_core())
    hand.tell(JobArrived(1, 5, 90))
    plan = hand.flying[0]
    hand.tell(IterationDone(plan.seq, plan.epoch, 10**15), 10**15)
    assert hand.core.jobs[1].level == 1
