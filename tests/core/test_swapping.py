"""Swapping step by step: what is freed when, what survives whom, and that nobody waits for ever."""

from collections.abc import Callable

import pytest

from fastserve_scheduler.core import SchedulerCore
from fastserve_scheduler.core.commands import (
    FinishJob,
    FreeHost,
    KeepHost,
    RejectJob,
    RejectReason,
    RunIteration,
    SwapDirection,
)
from fastserve_scheduler.core.events import (
    Event,
    HostSlotsGranted,
    JobAborted,
    JobArrived,
    StageDown,
    StageUp,
    SwapDone,
)
from fastserve_scheduler.core.kv_state import KV_MOVES, InvalidTransition, KvState
from fastserve_scheduler.sim import LinkCost, Simulator, simulate

from .rig import Rig
from .support import MS, PROFILE, PerToken, config, mlfq

OUT, IN = SwapDirection


def _one_out(num_slots: int = 20, **changes: object) -> Rig:
    """Six blocks; job 1 holds five of them and has fallen to a low queue; job 2 of Q1 needs three: job 1 must go."""
    rig = Rig(6, num_slots, **changes)
    rig.tell(JobArrived(1, 15, 9))
    for _ in range(3):
        rig.done()
    rig.tell(JobArrived(2, 9, 3))
    rig.done()
    return rig


def test_blocks_on_their_way_out_are_reused_when_every_stage_has_reported() -> None:
    rig = _one_out(num_stages=2)
    rig.until(1, KvState.OUTGOING)
    while rig.device.flying:
        rig.done()
    assert rig.core.jobs[2].kv is KvState.ABSENT, "it waits for the blocks, and nothing else can run"
    free = rig.core.pool.num_free
    rig.land()
    assert rig.core.pool.num_free == free, "one stage of two has its copy"
    commands = rig.land()
    (kept,) = (command for command in commands if isinstance(command, KeepHost))
    assert (kept.job_id, len(kept.slots)) == (1, 5)
    assert rig.state(2) is KvState.DEVICE
    rig.drain()


def test_a_job_comes_back_with_its_kv_and_goes_on() -> None:
    rig = _one_out()
    rig.until(1, KvState.HOST)
    computed = rig.core.jobs[1].computed
    rig.until(1, KvState.INCOMING).until(1, KvState.DEVICE)
    assert rig.core.jobs[1].computed >= computed > 0
    rig.drain()
    assert rig.core.counters.recomputed_tokens == 0
    assert rig.core.snapshot().preemptions_blocks >= 1


def test_a_full_block_is_copied_out_once() -> None:
    """Job 1 is driven out twice; the second time only what it computed since is copied."""
    rig = _one_out()
    rig.until(1, KvState.HOST).until(1, KvState.DEVICE)
    full = len(rig.core.jobs[1].host.slots)
    assert full == rig.core.jobs[1].computed // 4
    rig.done()
    rig.tell(JobArrived(3, 9, 3))
    rig.done()
    rig.until(1, KvState.OUTGOING)
    assert [job for job, _ in rig.swaps(OUT)] == [1, 1]
    assert rig.swaps(OUT)[1][1] == -(-rig.core.jobs[1].computed // 4) - full
    assert rig.core.snapshot().swap.clean_blocks_reused == full
    rig.drain()


def test_copies_of_jobs_on_the_device_are_dropped_first_when_slots_are_short() -> None:
    rig = _one_out(num_slots=5)
    rig.until(1, KvState.HOST).until(1, KvState.DEVICE)
    kept = rig.core.jobs[1].host.slots
    assert kept
    taken = rig.core.tiers._take_slots(5)
    assert rig.core.tiers.say() == [FreeHost(1, kept)]
    rig.core.tiers.host.give_back(taken)


def test_a_copy_that_fails_its_check_costs_the_job_a_prefill() -> None:
    for state in (KvState.OUTGOING, KvState.INCOMING):
        rig = _one_out()
        rig.until(1, state)
        while rig.state(1) is state and rig.device.flying:
            rig.done()
        rig.land(ok=False)
        assert rig.core.jobs[1].computed == 0
        assert rig.core.snapshot().swap.failed == 1
        rig.drain()
        assert rig.core.counters.recomputed_tokens > 0


def test_a_host_copy_outlives_the_stages() -> None:
    """Swapped in again, not computed again."""
    for state in (KvState.HOST, KvState.INCOMING):
        rig = _one_out()
        rig.until(1, state)
        computed = rig.core.jobs[1].computed
        rig.stage_falls()
        assert rig.core.jobs[1].computed == computed
        assert rig.state(1) in (KvState.HOST, KvState.INCOMING)
        rig.drain()


def test_what_the_host_has_of_a_job_on_the_device_outlives_the_stages_too() -> None:
    rig = _one_out()
    rig.until(1, KvState.HOST).until(1, KvState.DEVICE)
    full = rig.core.jobs[1].computed // 4 * 4
    rig.stage_falls()
    assert rig.core.jobs[1].computed == full > 0
    rig.drain()


def test_a_swap_out_is_void_when_a_stage_falls() -> None:
    rig = _one_out()
    rig.until(1, KvState.OUTGOING)
    swap_id = rig.device.copies[0].op.swap_id
    rig.stage_falls()
    assert rig.core.jobs[1].computed == 0
    assert rig.core.tiers.host.num_free == 20
    assert rig.tell(SwapDone(swap_id, 0, 0, True, 1, 1)) == [], "a copy of an earlier epoch"
    rig.drain()


@pytest.mark.parametrize("state", [KvState.OUTGOING, KvState.HOST, KvState.INCOMING, KvState.DEVICE])
def test_jobs_are_computed_again_when_the_host_store_falls(state: KvState) -> None:
    rig = _one_out()
    rig.until(1, state)
    rig.host_falls()
    assert rig.core.snapshot().swap.host_slots_total == 0
    if state is KvState.INCOMING:
        assert rig.core.jobs[1].table.block_ids, "a late copy still writes to these blocks"
    rig.grant()
    rig.drain()


_REACH: dict[str, Callable[[], Rig]] = {
    "waiting": lambda: _with_arrival(Rig(6, 20, max_batch_size=1), 9),
    "running": lambda: _one_out(),
    "swapping out": lambda: _one_out().until(1, KvState.OUTGOING),
    "on the host": lambda: _one_out().until(1, KvState.HOST),
    "swapping in": lambda: _one_out().until(1, KvState.INCOMING),
    "back": lambda: _one_out().until(1, KvState.HOST).until(1, KvState.DEVICE),
}


def _with_arrival(rig: Rig, job_id: int) -> Rig:
    rig.tell(JobArrived(1, 15, 9))
    rig.tell(JobArrived(job_id, 5, 3))
    return rig


@pytest.mark.parametrize("then", ["lands", "fails", "stage falls", "host falls"])
@pytest.mark.parametrize("state", list(_REACH))
def test_an_abort_in_any_state_gives_everything_back_once(state: str, then: str) -> None:
    rig = _REACH[state]()
    rig.tell(JobAborted(1))
    if state not in ("running", "waiting", "back"):
        assert 1 not in rig.core.jobs, "for the client it is over at once"
    rig.tell(JobAborted(1))
    match then:
        case "fails" if rig.device.copies:
            rig.land(ok=False)
        case "stage falls":
            rig.stage_falls()
        case "host falls":
            rig.host_falls()
            rig.grant()
        case _:
            pass
    rig.drain()
    assert sum(isinstance(command, FinishJob) and command.job_id == 1 for command in rig.said) == 1


def test_reports_that_cannot_be_are_refused_and_repeated_ones_ignored() -> None:
    rig = _one_out(num_stages=2).until(1, KvState.OUTGOING)
    swap_id = rig.device.copies[0].op.swap_id
    with pytest.raises(ValueError, match="stage 2"):
        rig.core.handle(SwapDone(swap_id, 2, 0, True, 1, 1), rig.now_ns)
    with pytest.raises(ValueError, match="granted twice"):
        rig.core.handle(HostSlotsGranted((30, 3)), rig.now_ns)
    assert rig.core.tiers.host.num_slots == 20
    first = rig.device.copies[0].stage
    rig.land()
    rig.core.handle(SwapDone(swap_id, first, 0, True, 1, 1), rig.now_ns)
    assert rig.state(1) is KvState.OUTGOING
    rig.drain()


def test_a_move_that_does_not_exist_tells_the_story() -> None:
    rig = _one_out().until(1, KvState.HOST)
    job = rig.core.jobs[1]
    with pytest.raises(InvalidTransition, match="from host to device") as raised:
        rig.core.tiers._move(job, KvState.DEVICE)
    assert raised.value.story == rig.core.story(1)
    assert "goes to the host" in str(raised.value)


def test_every_state_can_be_left_and_reached() -> None:
    assert {before for before, _ in KV_MOVES} == {after for _, after in KV_MOVES} == set(KvState)


# ---- nobody waits for ever


@pytest.mark.parametrize("kv_policy", ["proactive", "reactive", "blocking"])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("num_slots", [1000, 1, 0])
def test_a_working_set_of_three_pools_finishes_with_any_host(num_slots: int, stages: int, kv_policy: str) -> None:
    """The first use of the host must not be the last thing that happens, and no host at all is no excuse."""
    core = SchedulerCore(
        config(
            num_stages=stages, kv_policy=kv_policy, swap_min_batches=0, max_model_len=96, mlfq=mlfq(alpha_ns=300 * MS)
        ),
        PROFILE,
    )
    arrivals: list[tuple[int, Event]] = [(job_id * MS, JobArrived(job_id, 48, 48)) for job_id in (1, 2, 3)]
    result = simulate(core, arrivals, PerToken(stages), 24, host_slots=num_slots)
    assert [job.output_tokens for job in result.jobs.values()] == [48, 48, 48]
    assert result.end_ns < 10 * 3 * (48 + 48 * 10) * MS
    if num_slots == 1000:
        assert core.snapshot().swap.swaps_out > 0
        assert core.snapshot().recomputed_tokens == 0


@pytest.mark.parametrize("kv_policy", ["proactive", "reactive"])
def test_slow_copies_of_parked_jobs_do_not_freeze_a_large_arrival(kv_policy: str) -> None:
    """Three jobs are on the host and on their slow way back when a prompt of nearly the whole pool arrives."""
    core = SchedulerCore(
        config(kv_policy=kv_policy, swap_min_batches=0, max_batch_size=3, mlfq=mlfq(alpha_ns=3000 * MS)), PROFILE
    )
    arrivals: list[tuple[int, Event]] = [(0, JobArrived(job_id, 20, 30)) for job_id in (1, 2, 3)]
    arrivals += [(300 * MS, JobArrived(4, 80, 6)), (900 * MS, JobArrived(5, 80, 6))]
    link = LinkCost(latency_ns=200 * MS)
    simulator = Simulator(core, PerToken(), check=True, link=link)
    result = simulator.run(arrivals, 24, host_slots=64)
    assert [job.output_tokens for job in result.jobs.values()] == [30, 30, 30, 6, 6]
    assert core.snapshot().swap.swaps_out >= 3
    alone_ns = 3 * (20 + 300) + 2 * (80 + 60)
    assert result.end_ns < 10 * alone_ns * MS


@pytest.mark.parametrize("kv_policy", ["proactive", "reactive"])
@pytest.mark.parametrize("kv_ranking", ["order", "enst"])
def test_no_job_leaves_again_before_it_has_run(kv_policy: str, kv_ranking: str) -> None:
    """Six jobs that together need three times the pool, slow copies, two stages: a job swapped in runs before it goes
    out again, and each leaves no more often than it falls a level or starves."""
    changes = {"kv_policy": kv_policy, "kv_ranking": kv_ranking, "swap_min_batches": 0}
    core = SchedulerCore(config(num_stages=2, max_batch_size=2, mlfq=mlfq(alpha_ns=5000 * MS), **changes), PROFILE)
    came: dict[int, bool] = {}
    outs = dict.fromkeys(range(1, 7), 0)

    def watch(now_ns: int, plan: RunIteration) -> None:
        for op in plan.swaps:
            if op.direction is IN:
                came[op.job_id] = True
            else:
                outs[op.job_id] += 1
                assert not came.get(op.job_id), "swapped in, not run, swapped out"
        for item in plan.items:
            came[item.job_id] = False

    block_bytes = 100
    link = LinkCost(block_bytes=block_bytes, latency_ns=100 * MS)
    simulator = Simulator(core, PerToken(2), check=True, watch=watch, link=link)
    result = simulator.run([(job_id * MS, JobArrived(job_id, 8, 40)) for job_id in range(1, 7)], 24, host_slots=200)
    assert [job.output_tokens for job in result.jobs.values()] == [40] * 6
    promotions = core.snapshot().promotions
    assert max(outs.values()) <= len(core.order.quanta_ns()) + promotions
    working_set = 6 * 12 * block_bytes * 2
    assert core.snapshot().swap.bytes_out <= 4 * working_set


def test_an_urgent_job_takes_the_memory_of_long_ones_within_three_iterations_and_a_swap() -> None:
    core = SchedulerCore(config(max_batch_size=8, kv_policy="proactive", swap_min_batches=0), PROFILE)
    arrivals: list[tuple[int, Event]] = [(0, JobArrived(number, 8, 80)) for number in range(1, 5)]
    arrivals.append((260 * MS, JobArrived(9, 8, 8)))
    simulator = Simulator(core, PerToken(), check=True, link=LinkCost(latency_ns=20 * MS))
    result = simulator.run(arrivals, 30, host_slots=200)
    assert result.jobs[9].first_token_ns - 260 * MS <= 3 * 10 * MS + 20 * MS
    assert [job.output_tokens for job in result.jobs.values()] == [80, 80, 80, 80, 8]


def test_newcomers_are_deferred_when_both_tiers_are_full_and_refused_when_too_many_wait() -> None:
    rig = Rig(6, 1, max_waiting_jobs=2, max_batch_size=1)
    rig.tell(JobArrived(1, 15, 9))
    for _ in range(3):
        rig.done()
    rig.tell(JobArrived(2, 9, 3))
    rig.tell(JobArrived(3, 9, 3))
    rig.done()
    assert rig.state(1) is KvState.DEVICE, "nobody is driven out for a newcomer"
    assert rig.state(2) is rig.state(3) is KvState.ABSENT
    (refused,) = rig.tell(JobArrived(4, 9, 3))
    assert isinstance(refused, RejectJob)
    assert refused.reason is RejectReason.QUEUE_FULL_JOBS
    rig.drain()


def test_stages_down_hold_everything_until_all_are_up() -> None:
    rig = _one_out(num_stages=2).until(1, KvState.HOST)
    rig.tell(StageDown(1))
    assert not any(isinstance(command, RunIteration) for command in rig.tell(JobArrived(7, 4, 2)))
    rig.tell(StageUp(1, 6))
    rig.drain()
