"""Memory full: jobs do not throw each other out faster than they get on, and nobody waits for ever for room."""

import pytest

from fastserve_scheduler.core import SchedulerCore, waste
from fastserve_scheduler.core.events import Event, JobArrived
from fastserve_scheduler.core.kv import recompute
from fastserve_scheduler.core.kv_state import KvState
from fastserve_scheduler.core.policies import POLICIES
from fastserve_scheduler.core.waste import Waste
from fastserve_scheduler.sim import Simulator

from .rig import Rig
from .support import MS, PROFILE, PerToken, config, mlfq
from .test_swaps_at_random import Chaos

NEVER, ALWAYS = 1 << 40, -1
EVICTING = ["proactive", "reactive", "blocking", "recompute"]


def test_waste_is_tokens_lost_for_each_one_made() -> None:
    measured = Waste()

    def high_after(num_runs: int, lost: int) -> bool:
        for _ in range(num_runs):
            measured.lost(lost)
            measured.ran()
        return measured.high

    assert not high_after(10_000, waste.LIMIT), "as many as are allowed"
    assert high_after(10_000, waste.LIMIT + 1)
    assert not high_after(waste.WEIGHT, 0), "it is forgotten"


def crowd(stages: int, kv_policy: str) -> tuple[int, int]:
    """Eighteen jobs come at once and need six times what both tiers hold, with an alpha of a few iterations. Tokens
    computed again, and when all are done."""
    alpha = mlfq(alpha_ns=100 * MS)
    core = SchedulerCore(
        config(num_stages=stages, max_batch_size=4, kv_policy=kv_policy, swap_min_batches=0, mlfq=alpha), PROFILE
    )
    arrivals: list[tuple[int, Event]] = [(number * MS, JobArrived(number, 20, 40)) for number in range(1, 19)]
    result = Simulator(core, PerToken(stages), check=True).run(arrivals, 30, host_slots=40)
    assert [job.output_tokens for job in result.jobs.values()] == [40] * 18
    return core.counters.recomputed_tokens, result.end_ns


@pytest.mark.parametrize(
    ("kv_policy", "stages"), [("proactive", 1), ("reactive", 2), ("blocking", 1), ("recompute", 1), ("recompute", 2)]
)
def test_less_is_computed_again_when_memory_is_full(
    kv_policy: str, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    again, end_ns = crowd(stages, kv_policy)
    monkeypatch.setattr(waste, "LIMIT", NEVER)
    again_unheld, end_unheld_ns = crowd(stages, kv_policy)
    assert 3 * again < again_unheld
    assert end_ns < end_unheld_ns


def starving_newcomer(rig: Rig) -> Rig:
    """Twelve blocks on the device and one slot on the host; jobs 1 and 2 leave too few for job 3, which starves."""
    rig.tell(JobArrived(1, 12, 10))
    rig.tell(JobArrived(2, 12, 10))
    while rig.state(2) is not KvState.DEVICE:
        rig.done()
    rig.tell(JobArrived(3, 24, 4))
    for _ in range(6):
        rig.done()
    return rig


def test_who_starves_without_kv_waits_for_room_while_much_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"max_batch_size": 2, "mlfq": mlfq(alpha_ns=50 * MS)}
    rig = starving_newcomer(Rig(12, 1, **changes))
    rig.drain()
    assert rig.core.counters.recomputed_tokens > 0, "somebody was thrown out for it"
    monkeypatch.setattr(waste, "LIMIT", ALWAYS)
    rig = starving_newcomer(Rig(12, 1, **changes))
    assert rig.state(1) is rig.state(2) is KvState.DEVICE
    assert rig.state(3) is KvState.ABSENT
    rig.drain()
    assert rig.core.counters.recomputed_tokens == 0


@pytest.mark.parametrize(("kv_policy", "num_slots"), [("recompute", 0), ("proactive", 0), ("recompute", 100)])
def test_without_swapping_nobody_is_thrown_out_for_a_newcomer_while_much_is_lost(
    kv_policy: str, num_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"kv_policy": kv_policy, "max_batch_size": 2, "mlfq": mlfq(alpha_ns=50 * MS)}
    rig = starving_newcomer(Rig(12, num_slots, **changes))
    assert rig.state(3) is KvState.DEVICE, "somebody gave way"
    monkeypatch.setattr(waste, "LIMIT", ALWAYS)
    rig = starving_newcomer(Rig(12, num_slots, **changes))
    assert rig.state(1) is rig.state(2) is KvState.DEVICE
    assert rig.state(3) is KvState.ABSENT
    rig.drain()
    assert rig.core.counters.recomputed_tokens == 0


def test_some_room_is_left_after_a_newcomer_while_much_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waste, "LIMIT", ALWAYS)
    monkeypatch.setattr(recompute, "KEPT_PERCENT", 25)
    for prompt_tokens, begins in ((20, True), (21, False)):
        rig = Rig(12, 0, kv_policy="recompute", max_batch_size=2)
        rig.tell(JobArrived(1, 14, 4))
        rig.tell(JobArrived(2, prompt_tokens, 1))
        rig.done()
        state = rig.core.jobs[2].kv if 2 in rig.core.jobs else None
        assert (state is not KvState.ABSENT) is begins, "4 of 12 blocks are taken, 3 are kept, 5 are 20 tokens"


def test_who_needs_the_whole_pool_begins_when_nobody_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waste, "LIMIT", ALWAYS)
    rig = Rig(12, 0, kv_policy="recompute", max_batch_size=2)
    rig.tell(JobArrived(1, 4, 2))
    rig.tell(JobArrived(2, 47, 1))
    assert rig.state(2) is KvState.ABSENT
    rig.drain()


@pytest.mark.parametrize("kv_policy", EVICTING)
def test_nobody_waits_for_ever_for_room(kv_policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever falls or is aborted, in pools and hosts of any size: accepted jobs end."""
    monkeypatch.setattr(waste, "LIMIT", ALWAYS)
    for seed in range(8):
        num_blocks, num_slots = (8, 12, 24)[seed % 3], (1000, 6, 1, 0)[seed % 4]
        Chaos(200 + seed, "skip-join-mlfq", kv_policy, ("order", "enst")[seed % 2], num_blocks, num_slots).run()


@pytest.mark.parametrize("policy", list(POLICIES))
def test_any_order_may_save(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waste, "LIMIT", ALWAYS)
    for seed, (kv_policy, num_slots) in enumerate((("proactive", 6), ("proactive", 1), ("recompute", 0))):
        Chaos(300 + seed, policy, kv_policy, "order", (8, 12, 24)[seed], num_slots).run()
