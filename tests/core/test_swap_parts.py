"""The parts of swapping by themselves: estimates, rankings, ledger, link, reserve, clocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve_scheduler.core import SchedulerCore
from fastserve_scheduler.core.appetite import Appetite
from fastserve_scheduler.core.commands import RunIteration, SwapDirection
from fastserve_scheduler.core.due_clock import DueClock
from fastserve_scheduler.core.enst import ERROR_BOUNDS_NS, execute_ns
from fastserve_scheduler.core.events import JobArrived, StageDown, StageUp, SwapDone, Woke
from fastserve_scheduler.core.host import HostError, HostSlots
from fastserve_scheduler.core.job import Job
from fastserve_scheduler.core.kv_state import KvState
from fastserve_scheduler.core.link import ITERATIONS_AHEAD, MAX_CREDIT_NS, POOL_SHARE, Link
from fastserve_scheduler.core.tally import Tally
from fastserve_scheduler.sim import LinkCost, Simulator
from fastserve_scheduler.sim.cost import OPT_13B_A100
from fastserve_scheduler.sim.workload import poisson

from .rig import Rig
from .support import MS, PROFILE, config, mlfq

OUT, IN = SwapDirection


# ---- ENST


def _pairwise_ns(quanta_ns: list[int], levels: list[int], level: int, batch: int, eta: int) -> int:
    """The paper's formula as written: every job of higher priority, and the quanta it uses up on its way down."""
    total_ns = 0
    for other in levels:
        while other < level:
            total_ns += quanta_ns[other]
            other += eta
    return total_ns // batch


@given(
    quanta_ns=st.lists(st.integers(1, 1000), min_size=1, max_size=12),
    jobs=st.lists(st.integers(0, 11), max_size=40),
    batch=st.integers(1, 16),
    eta=st.integers(1, 3),
)
def test_execution_time_by_prefix_sums_is_the_papers_sum_over_pairs(
    quanta_ns: list[int], jobs: list[int], batch: int, eta: int
) -> None:
    levels = [min(job, len(quanta_ns) - 1) for job in jobs]
    sizes = [levels.count(level) for level in range(len(quanta_ns))]
    times = execute_ns(quanta_ns, sizes, batch, eta)
    assert times == [_pairwise_ns(quanta_ns, levels, level, batch, eta) for level in range(len(quanta_ns))]
    assert times == sorted(times), "a lower level is never due sooner"


def test_enst_is_the_sooner_of_promotion_and_turn() -> None:
    rig = Rig(100, 10, mlfq=mlfq(alpha_ns=50 * MS), max_batch_size=2)
    for number, prompt in enumerate((5, 5, 5, 5, 35), 1):
        rig.tell(JobArrived(number, prompt, 4))
    job = rig.core.jobs[5]
    # Levels: four jobs in Q1 (10 ms), this one two below (q = 10, 20, 40): 4 * (10 + 20) / 2 until its turn.
    assert (job.level, rig.core.enst.of(job, 0)) == (2, 50 * MS)
    assert rig.core.enst.execute_ns()[2] == 60 * MS
    assert rig.core.enst.of(job, 30 * MS) == 20 * MS
    assert rig.core.enst.of(job, 90 * MS) == 0


def test_errors_of_the_estimate_fall_into_their_buckets() -> None:
    errors = Tally(ERROR_BOUNDS_NS)
    for error_ns in (-20_000 * MS, 0, 1, 40_000 * MS):
        errors.observe(error_ns)
    assert errors.counts[0] == errors.counts[-1] == 1
    assert errors.counts[ERROR_BOUNDS_NS.index(0)] == 1
    assert errors.counts[ERROR_BOUNDS_NS.index(100 * MS)] == 1
    assert sum(errors.counts) == 4


def test_the_estimate_is_compared_with_what_happened() -> None:
    rig = Rig(6, 20)
    rig.tell(JobArrived(1, 15, 9))
    for _ in range(3):
        rig.done()
    rig.tell(JobArrived(2, 9, 3))
    rig.until(1, KvState.OUTGOING)
    promised_ns = rig.core.jobs[1].promised_ns
    assert promised_ns > rig.now_ns
    rig.until(1, KvState.HOST).until(1, KvState.DEVICE)
    swap = rig.core.snapshot().swap
    assert swap.enst_error_sum_ns == rig.now_ns - promised_ns
    assert sum(swap.enst_error_counts) == 1


# ---- rankings


def _idle_rig(ranking: str) -> Rig:
    """One slot in the batch, five jobs with KV, waiting at several levels for several times."""
    rig = Rig(200, 200, kv_ranking=ranking, max_batch_size=1, mlfq=mlfq(alpha_ns=900 * MS))
    for number, prompt in enumerate((9, 18, 30, 9, 18), 1):
        rig.tell(JobArrived(number, prompt, 40))
    for _ in range(60):
        rig.done()
        if len({job.level for job in rig.core.line.ready}) > 1 and len(rig.core.line.ready) >= 3:
            return rig
    raise AssertionError("the jobs are never at different levels")


def test_by_order_the_last_leaves_first_and_the_first_comes_first() -> None:
    rig = _idle_rig("order")
    ready = list(rig.core.line.ready)
    ranking = rig.core._former._kv._ranking
    assert list(ranking.leaving(rig.now_ns)) == ready[::-1]
    for job in ready[1:]:
        rig.core.tiers.send_out(job)
    assert list(ranking.coming(rig.now_ns)) == list(rig.core.line.hosted)


def test_by_enst_jobs_leave_and_come_in_the_order_of_their_estimates() -> None:
    rig = _idle_rig("enst")
    ranking = rig.core._former._kv._ranking
    now_ns = rig.now_ns

    def estimates(jobs: list[Job]) -> list[int]:
        return [rig.core.enst.of(job, now_ns) for job in jobs]

    leaving = list(ranking.leaving(now_ns))
    assert sorted(job.job_id for job in leaving) == sorted(job.job_id for job in rig.core.line.ready)
    assert estimates(leaving) == sorted(estimates(leaving), reverse=True)
    assert len(set(estimates(leaving))) > 1
    for job in leaving:
        rig.core.tiers.send_out(job)
    rig.core.tiers.swaps.depart()
    for swap in rig.core.tiers.swaps.all():
        rig.core.tiers.landed(SwapDone(swap.op.swap_id, 0, 0, True, 1, 1))
    coming = list(ranking.coming(now_ns))
    assert sorted(job.job_id for job in coming) == sorted(job.job_id for job in leaving)
    assert estimates(coming) == sorted(estimates(coming))


def test_an_order_without_levels_ranks_by_itself() -> None:
    core = SchedulerCore(config(policy="fcfs", kv_policy="proactive", kv_ranking="enst"), PROFILE)
    assert not core.enst.known
    assert type(core._former._kv._ranking).__name__ == "OrderRanking"


# ---- ledger


def test_slots_are_granted_taken_and_given_back_once() -> None:
    slots = HostSlots()
    slots.grant((4, 5))
    slots.grant((9,))
    taken = slots.take(3)
    assert sorted(taken) == [4, 5, 9]
    with pytest.raises(HostError, match="1 host slots asked, 0 free"):
        slots.take(1)
    slots.give_back(taken[:1])
    with pytest.raises(HostError, match="given back twice"):
        slots.give_back(taken[:1])
    with pytest.raises(ValueError, match="granted twice"):
        slots.grant((10, 4))
    assert (slots.num_slots, slots.num_free) == (3, 1)
    slots.void()
    assert (slots.num_slots, slots.num_free) == (0, 0)
    slots.grant((4,))
    with pytest.raises(HostError):
        slots.give_back((5,))


# ---- link


def test_one_swap_may_always_start_and_more_while_the_link_carries_them_in_time() -> None:
    link = Link(kv_block_bytes=0, iteration_ns=10 * MS)
    assert link.may_send(OUT, 500, 0, 1000), "nothing is known and nothing under way"
    assert not link.may_send(OUT, 1, 1, 1000), "the first one measures the link"
    link.observe_copy(OUT, 10, 10 * MS)
    most = ITERATIONS_AHEAD * 10
    assert link.may_send(OUT, most - 1, 1, 1000)
    assert not link.may_send(OUT, most, 1, 1000)
    assert not link.may_send(IN, 1, 1, 1000), "the other direction is measured by itself"
    assert not link.may_send(OUT, 5, 20, 20 * POOL_SHARE), "blocks that move run nothing"


def test_the_speed_follows_what_is_measured_and_starts_from_a_cautious_guess() -> None:
    link = Link(kv_block_bytes=4_000_000, iteration_ns=10 * MS)
    assert link.block_ns(IN) == MS
    for _ in range(80):
        link.observe_copy(IN, 4, 8 * MS)
    assert 19 * MS < link.block_ns(IN) * 10 <= 20 * MS
    link.observe_copy(IN, 0, 5)
    assert link.block_ns(IN) * 10 <= 20 * MS


def test_promotions_have_half_of_the_links_time() -> None:
    link = Link(kv_block_bytes=0, iteration_ns=10 * MS)
    link.observe_copy(IN, 1, MS)
    spent, now_ns = 0, 0
    for now_ns in range(0, 10_000 * MS, MS):
        while link.afford_promotion(20, now_ns):
            spent += 20 * MS
    assert now_ns // 2 <= spent <= now_ns // 2 + MAX_CREDIT_NS + 20 * MS
    assert not link.afford_promotion(10**6, now_ns)
    assert link.afford_promotion(10**6, now_ns + 2 * MAX_CREDIT_NS), "a huge job comes when all is saved up"


def test_a_storm_of_promotions_leaves_half_of_the_link() -> None:
    """alpha 0.3 s, many jobs, a slow link: promoting whoever starves would need several times what it carries."""
    block_bytes, bytes_per_second = 1 << 20, 50 << 20
    core = SchedulerCore(
        config(
            block_size=16, max_batch_size=8, max_batch_tokens=2048, max_model_len=2048, kv_policy="proactive",
            mlfq=mlfq(alpha_ns=300 * MS), kv_block_bytes=block_bytes,
        ),
        OPT_13B_A100.profile(2048, 8),
    )  # fmt: skip
    came = 0

    def watch(now_ns: int, plan: RunIteration) -> None:
        nonlocal came
        came += sum(len(op.device_blocks) for op in plan.swaps if op.direction is IN)

    simulator = Simulator(core, OPT_13B_A100, watch=watch, link=LinkCost(block_bytes, bytes_per_second))
    result = simulator.run(poisson(60, 4.0, 1), 300, host_slots=4000)
    snapshot = core.snapshot()
    assert all(job.reason is not None for job in result.jobs.values())
    assert snapshot.swap.promotions_put_off > 100
    carried = bytes_per_second * result.end_ns / 1e9
    assert came * block_bytes < 0.75 * carried, "half for promotions, and what is due by itself"


# ---- reserve


def test_the_reserve_follows_arrivals_within_its_bounds() -> None:
    appetite = Appetite(config(swap_reserve_min_percent=2, swap_reserve_max_percent=5))
    assert appetite.reserve(1000) == 20
    for _ in range(60):
        appetite.arrived(8)
        appetite.launched(100)
    assert 28 <= appetite.reserve(1000) <= 32
    for _ in range(60):
        appetite.arrived(500)
        appetite.launched(100)
    assert appetite.reserve(1000) == 50


def test_a_pool_of_less_than_two_running_batches_is_not_roomy() -> None:
    appetite = Appetite(config())
    assert appetite.roomy(1), "nothing has run"
    for _ in range(60):
        appetite.launched(100)
    assert appetite.roomy(200)
    assert not appetite.roomy(190)
    assert Appetite(config(swap_min_batches=0)).roomy(1)


# ---- time blocked


def test_waits_are_summed_over_jobs_and_the_device_stalls_only_while_idle() -> None:
    clock = DueClock()
    clock.note(10, 0, 0, idle=True)
    clock.note(20, 2, 1, idle=False)
    assert (clock.blocked_ns, clock.roomless_ns, clock.stalled_ns) == (0, 0, 0)
    clock.note(50, 1, 1, idle=True)
    assert (clock.blocked_ns, clock.roomless_ns, clock.stalled_ns) == (60, 30, 0)
    clock.note(57, 0, 3, idle=True)
    assert (clock.blocked_ns, clock.roomless_ns, clock.stalled_ns) == (67, 37, 7)
    clock.note(60, 0, 0, idle=True)
    assert (clock.blocked_ns, clock.roomless_ns, clock.stalled_ns) == (67, 46, 7), "no room is not a copy's fault"


def _waits(rig: Rig) -> tuple[int, int, int]:
    """Blocked, without room, device stalled; in ms."""
    swap = rig.core.snapshot().swap
    return swap.blocked_ns // MS, swap.roomless_ns // MS, swap.stalled_ns // MS


def _later(rig: Rig, ms: int) -> None:
    rig.now_ns += ms * MS


def _alone_on_the_host(**changes: object) -> Rig:
    """Job 1 of five blocks is on the host, job 2 has just ended: nothing is in flight but job 1's way back."""
    rig = Rig(7, 20, **changes)
    rig.tell(JobArrived(1, 15, 9))
    for _ in range(3):
        rig.done()
    rig.tell(JobArrived(2, 9, 3))
    rig.until(1, KvState.HOST)
    while 2 in rig.core.jobs:
        rig.done()
    while rig.device.flying:
        rig.done(0)
    assert rig.state(1) is KvState.INCOMING
    return rig


def test_a_job_on_its_way_back_is_blocked_and_so_is_the_idle_device() -> None:
    rig = _alone_on_the_host()
    before = _waits(rig)
    _later(rig, 7)
    rig.land()
    assert rig.core.num_flying == 1
    assert _waits(rig) == (before[0] + 7, before[1], before[2] + 7)
    rig.done()
    assert _waits(rig) == (before[0] + 7, before[1], before[2] + 7), "a job that runs waits for nothing"


def test_a_newcomer_waits_for_the_copy_that_makes_room_for_it() -> None:
    rig = Rig(6, 20)
    rig.tell(JobArrived(1, 15, 9))
    for _ in range(3):
        rig.done()
    rig.tell(JobArrived(2, 9, 3))
    rig.until(1, KvState.OUTGOING)
    while rig.device.flying:
        rig.done(0)
    before = _waits(rig)
    _later(rig, 4)
    rig.land()
    # Both: job 2, whose blocks are leaving, and job 1, whose own KV is: a batch of two would have had them.
    assert _waits(rig) == (before[0] + 8, before[1], before[2] + 4)


def test_a_job_without_room_is_not_blocked_by_copies() -> None:
    """Job 2 of Q1 runs in the blocks that job 1 of a low queue would need: no copy is under way, and no room either."""
    rig = Rig(6, 20)
    rig.tell(JobArrived(1, 15, 9))
    for _ in range(3):
        rig.done()
    rig.tell(JobArrived(2, 9, 3))
    rig.until(1, KvState.HOST)
    assert not rig.device.copies
    assert rig.core.num_flying == 1
    rig.done(0)
    before = _waits(rig)
    assert rig.core.num_flying == 1
    _later(rig, 3)
    rig.done(0)
    assert _waits(rig) == (before[0], before[1] + 3, before[2])


@pytest.mark.parametrize(("kv_policy", "runs"), [("reactive", 1), ("blocking", 0)])
def test_a_batch_waits_for_its_own_copies_only_when_it_blocks(kv_policy: str, runs: int) -> None:
    """Job 1 is on its way back and job 3 has just come: blocking, both wait, and so does the device."""
    rig = _alone_on_the_host(kv_policy=kv_policy)
    rig.tell(JobArrived(3, 2, 3))
    assert rig.core.num_flying == runs
    before = _waits(rig)
    _later(rig, 5)
    rig.land()
    if runs:
        rig.done(0)
    assert rig.core.num_flying == 2
    assert _waits(rig) == (before[0] + 5 * (2 - runs), before[1], before[2] + 5 * (1 - runs))
    rig.drain()


def test_more_jobs_than_the_batch_has_slots_for_are_not_blocked() -> None:
    rig = _idle_rig("order")
    for job in list(rig.core.line.ready):
        rig.core.tiers.send_out(job)
    while rig.device.flying:
        rig.done(0)
    assert len(rig.core.line.moving) > 1
    before = _waits(rig)
    _later(rig, 5)
    rig.tell(Woke())
    assert _waits(rig)[0] == before[0] + 5, "a batch of one has one slot to miss"


def test_an_outage_is_not_counted_as_waiting_for_copies() -> None:
    rig = _alone_on_the_host()
    rig.tell(StageDown(0))
    before = _waits(rig)
    _later(rig, 500)
    rig.tell(StageUp(0, 7))
    assert _waits(rig) == before


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"kv_ranking": "luck"}, "kv_ranking must be one of enst, order"),
        ({"kv_block_bytes": -1}, "kv_block_bytes"),
        ({"swap_reserve_min_percent": 9}, "swap_reserve_max_percent must be at least 9"),
        ({"swap_reserve_max_percent": 51}, "at most 50"),
        ({"swap_min_batches": -1}, "swap_min_batches"),
    ],
)
def test_a_wrong_swap_setting_is_refused_by_name(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        config(**changes)
