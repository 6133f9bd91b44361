"""Orders beyond the paper: what each of them runs first, and that none lets a job starve."""

from fastserve_scheduler.core.events import JobArrived, Woke
from fastserve_scheduler.core.history import Happening

from .support import MS, PROFILE, Hand, mlfq, ran, ready_core


def running(hand: Hand) -> list[int]:
    return [item.job_id for item in hand.flying[0].items]


def served(hand: Hand) -> list[int]:
    """Who ran in each iteration to the end, with batches of one."""
    order = []
    while hand.flying:
        order += running(hand)
        hand.done()
    return order


def alone(policy: str, **changes: int) -> Hand:
    """One job runs at a time. The first one has a token, so that the rest are ranked together."""
    hand = Hand(ready_core(1000, PROFILE, max_batch_size=1, policy=policy, **changes))
    hand.tell(JobArrived(99, 5, 1))
    return hand


def test_slack_runs_whose_next_token_is_due_first() -> None:
    hand = alone("slack", slo_first_token_ns=100 * MS, slo_token_ns=100 * MS, slack_step_ns=MS)
    hand.tell(JobArrived(1, 5, 9))
    for _ in range(4):
        hand.done()
    hand.tell(JobArrived(2, 5, 2))
    hand.done()
    assert running(hand) == [2], "job 1 has slack of several tokens"


def test_slack_does_not_take_turns_within_a_step() -> None:
    hand = alone("slack", slack_step_ns=10_000 * MS)
    for job_id in (1, 2):
        hand.tell(JobArrived(job_id, 5, 4))
    assert served(hand) == [99, 1, 1, 1, 1, 2, 2, 2, 2]


def test_slack_serves_those_on_time_before_those_who_are_late_already() -> None:
    hand = alone("slack", slo_first_token_ns=50 * MS, slo_token_ns=50 * MS, slack_step_ns=MS)
    hand.tell(JobArrived(1, 5, 3))
    hand.done(200 * MS)
    assert running(hand) == [1], "late, and nobody else is here"
    hand.tell(JobArrived(2, 5, 1))
    hand.done(10 * MS)
    assert running(hand) == [2]


def test_a_job_becomes_late_by_waiting_alone() -> None:
    hand = Hand(ready_core(max_batch_size=1, policy="slack", slo_first_token_ns=50 * MS, slack_step_ns=MS))
    hand.tell(JobArrived(1, 5, 1))
    hand.tell(JobArrived(2, 5, 1))
    assert hand.core.jobs[2].level == 0
    hand.tell(Woke(), 60 * MS)
    assert hand.core.jobs[2].level == 1
    hand.tell(JobArrived(3, 5, 1), 60 * MS)
    hand.done(5 * MS)
    assert running(hand) == [3]


def test_las_runs_who_had_least() -> None:
    hand = alone("las")
    hand.tell(JobArrived(1, 5, 6))
    hand.tell(JobArrived(2, 35, 2))
    assert served(hand) == [99, 1, 2, 1, 2, 1, 1, 1, 1], "each iteration is charged 10 ms here"


def test_sjf_runs_the_shortest_first_by_hint_and_prompt() -> None:
    hand = alone("sjf")
    hand.tell(JobArrived(1, 5, 90, expected_output_tokens=9))
    hand.tell(JobArrived(2, 5, 90, expected_output_tokens=2))
    hand.tell(JobArrived(3, 45, 90, expected_output_tokens=3))
    assert sorted(hand.core.jobs, key=lambda job_id: hand.core.jobs[job_id].key)[-3:] == [2, 3, 1]
    hand.done()
    assert running(hand) == [2]


def test_edf_serves_priorities_and_then_deadlines() -> None:
    hand = alone("edf", slo_first_token_ns=100 * MS, slo_token_ns=100 * MS)
    hand.tell(JobArrived(1, 5, 2, expected_output_tokens=2))
    hand.tell(JobArrived(2, 5, 2, expected_output_tokens=2, priority=-3))
    hand.tell(JobArrived(3, 5, 1, expected_output_tokens=1))
    assert served(hand) == [99, 2, 2, 3, 1, 1]


def test_plas_counts_what_the_calls_of_a_program_had() -> None:
    hand = alone("plas")
    hand.tell(JobArrived(1, 5, 8, program="agent"))
    for _ in range(9):
        hand.done()
    hand.tell(JobArrived(2, 5, 1, program="agent"))
    hand.tell(JobArrived(3, 5, 1, program="another"))
    hand.tell(JobArrived(4, 5, 1))
    levels = [hand.core.jobs[job_id].level for job_id in (2, 3, 4)]
    assert levels == [3, 0, 0], "80 ms are more than 10 + 20 + 40"


def test_predicted_runs_a_started_job_by_its_hint() -> None:
    hand = Hand(ready_core(max_batch_size=1, policy="predicted", probe_tokens=1))
    hand.tell(JobArrived(1, 5, 500, expected_output_tokens=400))
    hand.done()
    hand.done()
    hand.tell(JobArrived(2, 5, 90, expected_output_tokens=8))
    hand.done()
    assert running(hand) == [2]
    for _ in range(8):
        hand.done()
    assert running(hand) == [2], "what it still needs is less"
    assert hand.core.jobs[2].level < hand.core.jobs[1].level


def test_a_guess_that_is_too_small_gains_nothing_for_long() -> None:
    keys = {}
    for hint in (1, 200):
        hand = Hand(ready_core(max_batch_size=1, policy="predicted"))
        hand.tell(JobArrived(1, 5, 500, expected_output_tokens=hint))
        for _ in range(120):
            hand.done()
        keys[hint] = hand.core.jobs[1].key
    assert keys[1] >= keys[200]


def test_the_snapshot_shows_how_well_lengths_are_known() -> None:
    hand = Hand(ready_core(policy="predicted"))
    for job_id in range(40):
        hand.tell(JobArrived(job_id, 5, 4, expected_output_tokens=1 + job_id % 2))
    while hand.flying:
        hand.done()
    guessers = {guesser.name: guesser for guesser in hand.core.snapshot().guessers}
    assert list(guessers) == ["hint", "limit", "history"]
    assert guessers["hint"].seen == 40
    assert guessers["hint"].log_error > 1
    assert not guessers["hint"].believed
    assert guessers["limit"].log_error == 0


def test_predicted_without_guesses_is_feedback_queues() -> None:
    hand = Hand(ready_core(max_batch_size=1, policy="predicted"))
    hand.tell(JobArrived(1, 35, 90))
    assert hand.core.jobs[1].level == 2, "40 ms cover the prompt"
    hand.done(35 * MS)
    levels = []
    for _ in range(7):
        levels.append(hand.core.jobs[1].level)
        hand.done()
    assert levels == [0, 1, 1, 2, 2, 2, 2], "its prompt is paid when the first token is there"


def test_predicted_gives_a_starving_job_a_burst_and_puts_it_back() -> None:
    hand = Hand(ready_core(max_batch_size=1, policy="predicted", mlfq=mlfq(alpha_ns=300 * MS)))
    hand.tell(JobArrived(1, 5, 60))
    for _ in range(40):
        hand.done()
    level, number = hand.core.jobs[1].level, 1
    had = list[bool]()
    while len(had) < 60:
        number += 1
        hand.tell(JobArrived(number, 5, 1))
        had.append(1 in running(hand))
        hand.done()
    bursts = [len(turn) for turn in "".join("x" if one else "." for one in had).split(".") if turn]
    assert bursts[1] == 8, "the first is what is left of its turn before others came"
    assert hand.core.jobs[1].level >= level
    assert Happening.TICKET in [moment.happening for moment in hand.core.story(1)]


def test_an_iteration_may_be_charged_by_share() -> None:
    for charge, used_ns in (("wall", 12 * MS), ("share", 6 * MS)):
        hand = Hand(ready_core(mlfq=mlfq(charge=charge)))
        hand.tell(JobArrived(9, 5, 1))
        hand.tell(JobArrived(1, 15, 5))
        hand.tell(JobArrived(2, 15, 5))
        hand.done()
        hand.done(12 * MS)
        assert [hand.core.jobs[job_id].used_ns for job_id in (1, 2)] == [used_ns, used_ns]


def test_a_job_may_go_to_the_top_with_its_first_token() -> None:
    for choice, level in (("stay", 2), ("top", 0)):
        hand = Hand(ready_core(mlfq=mlfq(after_prefill=choice)))
        hand.tell(JobArrived(1, 35, 5))
        assert hand.core.jobs[1].level == 2
        hand.done(35 * MS)
        assert hand.core.jobs[1].level == level


def test_alpha_follows_the_backlog() -> None:
    hand = Hand(ready_core(max_batch_size=1, mlfq=mlfq(alpha_ns=MS, alpha_rounds=8)))
    hand.tell(JobArrived(1, 5, 40))
    hand.done()
    for number in range(2, 12):
        hand.tell(JobArrived(number, 5, 40))
    hand.done()
    to_come_ns = hand.core.unstarted_ns
    assert to_come_ns >= 9 * 5 * MS, "one has run, one runs, nine have not had their prompts computed"
    assert hand.core.clock.alpha_ns("") == 8 * (to_come_ns + 11 * 10 * MS)
    assert ran(hand.done()) != []
