"""An operator changes numbers and policies under running jobs: none is lost, and the new wish holds from now on."""

from dataclasses import replace

import pytest

from fastserve_scheduler.core import SchedulerCore
from fastserve_scheduler.core.commands import RejectJob, RejectReason
from fastserve_scheduler.core.events import ConfigChanged, JobArrived, Woke
from fastserve_scheduler.core.history import Happening
from fastserve_scheduler.core.policies import POLICIES
from fastserve_scheduler.journal_codec import decode_event, encode_event

from .rig import Rig
from .support import MS, PROFILE, Hand, mlfq, ran, ready_core


def change(core: SchedulerCore, **changes: object) -> ConfigChanged:
    return ConfigChanged(replace(core.config, **changes))  # type: ignore[arg-type]  # names checked by the dataclass


def level_of(core: SchedulerCore, job_id: int) -> int:
    return core.jobs[job_id].level


def hand(**changes: object) -> Hand:
    return Hand(ready_core(1000, PROFILE, **changes))


def test_a_lowered_batch_cap_preempts_at_the_next_iteration() -> None:
    play = hand(max_batch_size=4)
    for job_id in range(4):
        play.tell(JobArrived(job_id, 1, 50))
    play.done()
    before = play.core.counters.preemptions
    total = sum(before.values())
    assert len(play.flying[0].items) > 1
    play.tell(change(play.core, max_batch_size=1))
    assert len(play.flying[0].items) > 1, "what flies lands as it was sent"
    play.done()
    assert len(play.flying[0].items) == 1
    assert sum(play.core.counters.preemptions.values()) > total


def test_a_raised_batch_cap_is_used_at_once() -> None:
    play = hand(max_batch_size=1)
    for job_id in range(3):
        play.tell(JobArrived(job_id, 1, 50))
    play.tell(change(play.core, max_batch_size=3))
    play.done()
    assert len(play.flying[0].items) == 3


def test_queue_limits_hold_for_those_who_come_after() -> None:
    play = hand(max_batch_size=1)
    for job_id in range(4):
        play.tell(JobArrived(job_id, 5, 50))
    (refused,) = play.tell(change(play.core, max_waiting_jobs=2)) or play.tell(JobArrived(9, 5, 5))
    assert isinstance(refused, RejectJob)
    assert refused.reason is RejectReason.QUEUE_FULL_JOBS
    assert refused.limit == 2
    assert len(play.core.jobs) == 4, "who is here stays"


def test_other_quanta_leave_levels_and_accounts_alone() -> None:
    play = hand(max_batch_size=1)
    for job_id, prompt in ((1, 10), (2, 35), (3, 300)):
        play.tell(JobArrived(job_id, prompt, 50))
    before = {job_id: (job.level, job.used_ns, job.rank) for job_id, job in play.core.jobs.items()}
    play.tell(change(play.core, mlfq=mlfq(ratio=4)))
    assert {job_id: (job.level, job.used_ns, job.rank) for job_id, job in play.core.jobs.items()} == before
    assert play.core.order.quanta_ns()[:3] == (10 * MS, 40 * MS, 160 * MS)
    play.tell(JobArrived(4, 35, 5))
    assert level_of(play.core, 4) == 1
    assert level_of(play.core, 2) == 2


def test_a_shorter_alpha_finds_who_has_waited_longer() -> None:
    play = hand(max_batch_size=1, mlfq=mlfq(alpha_ns=10_000 * MS))
    play.tell(JobArrived(1, 1, 100))
    play.tell(JobArrived(2, 500, 5))
    for _ in range(5):
        play.done()
    assert play.core.rescue.promotions + play.core.rescue.tickets == 0
    play.tell(change(play.core, mlfq=mlfq(alpha_ns=20 * MS)))
    assert play.core.rescue.tickets >= 1
    play.done()
    assert [item.job_id for item in play.flying[0].items] == [2]


def test_another_policy_takes_all_jobs_over_in_their_order() -> None:
    play = hand(max_batch_size=1)
    for job_id, prompt in ((1, 1), (2, 300), (3, 40), (4, 5)):
        play.tell(JobArrived(job_id, prompt, 3))
    play.tell(change(play.core, policy="fcfs"))
    order = []
    while play.flying:
        order += [item.job_id for item in play.flying[0].items]
        play.done()
    assert list(dict.fromkeys(order)) == [1, 4, 3, 2], "as they stood in the queues"
    assert not play.core.jobs


def test_the_story_tells_of_it() -> None:
    play = hand(max_batch_size=1)
    play.tell(JobArrived(1, 1, 3))
    play.tell(JobArrived(2, 300, 3))
    play.tell(change(play.core, policy="fcfs"))
    play.tell(change(play.core, policy="skip-join-mlfq"))
    requeued = [moment.detail for moment in play.core.story(2) if moment.happening is Happening.REQUEUED]
    assert requeued[-1] == level_of(play.core, 2) > 0


def test_a_ticket_is_void_under_another_policy_and_its_holder_still_runs() -> None:
    play = hand(max_batch_size=1, mlfq=mlfq(alpha_ns=20 * MS))
    play.tell(JobArrived(1, 1, 100))
    play.tell(JobArrived(2, 500, 2))
    play.tell(Woke(), 25 * MS)
    holders = [job.job_id for job in play.core.jobs.values() if job.ticket]
    assert holders == [2]
    play.tell(change(play.core, policy="naive-mlfq"))
    assert not any(job.ticket for job in play.core.jobs.values())
    for _ in range(20):
        play.done()
    assert 2 not in play.core.jobs


@pytest.mark.parametrize("after", list(POLICIES))
@pytest.mark.parametrize("before", ["skip-join-mlfq", "fcfs"])
@pytest.mark.parametrize("ranking", ["enst", "order"])
def test_no_job_is_lost_between_any_two_policies_while_kv_moves(before: str, after: str, ranking: str) -> None:
    rig = Rig(12, 30, max_batch_size=2, policy=before, kv_ranking=ranking, max_model_len=200)
    for job_id in range(8):
        rig.tell(JobArrived(job_id, 6 + job_id, 12, oracle_output_tokens=12))
    for step in range(60):
        rig.go_on()
        if step % 7 == 3:
            rig.tell(change(rig.core, policy=after if step % 2 else before))
    rig.drain()
    assert all(client.finished is not None for client in rig.device.clients.values())


@pytest.mark.parametrize(
    ("name", "value"), [("num_stages", 2), ("block_size", 8), ("max_model_len", 500), ("kv_policy", "defer")]
)
def test_what_stages_were_started_with_cannot_change(name: str, value: object) -> None:
    play = hand()
    with pytest.raises(ValueError, match=f"{name} cannot be changed"):
        play.tell(change(play.core, **{name: value}))
    assert ran(play.tell(JobArrived(1, 4, 2))) == [[1]], "and nothing has"


def test_a_change_goes_through_the_journal() -> None:
    event = change(ready_core(), policy="fcfs", mlfq=mlfq(ratio=3), max_batch_size=7)
    assert decode_event(encode_event(event)) == event
