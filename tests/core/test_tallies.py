"""Histograms of the core: each value by hand, from a device that is moved on by hand."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from fastserve_scheduler.core.commands import SwapDirection
from fastserve_scheduler.core.events import JobAborted, JobArrived, StageDown, StageUp
from fastserve_scheduler.core.kv_state import KvState
from fastserve_scheduler.core.request_times import RequestTimesSnapshot
from fastserve_scheduler.core.residency import STAY_BOUNDS_NS, ResidencySnapshot, StayEnd
from fastserve_scheduler.core.tally import Tally, TallySnapshot

from .rig import Rig
from .support import MS


@given(values=st.lists(st.integers(-5, 25)))
def test_each_value_is_in_the_first_bucket_that_may_hold_it(values: list[int]) -> None:
    tally = Tally((0, 5, 10))
    for value in values:
        tally.observe(value)
    expected = [
        sum(value <= 0 for value in values),
        sum(0 < value <= 5 for value in values),
        sum(5 < value <= 10 for value in values),
        sum(value > 10 for value in values),
    ]
    assert tally.snapshot() == TallySnapshot((0, 5, 10), tuple(expected), sum(values))
    assert tally.snapshot().count == len(values)


# ---- requests


def times(rig: Rig) -> RequestTimesSnapshot:
    return rig.core.snapshot().times


def in_ms(tally: TallySnapshot) -> tuple[int, float]:
    """How many, and their sum."""
    return tally.count, tally.total / MS


def test_phases_of_a_request_that_waits_runs_and_ends() -> None:
    rig = Rig(100, 0, max_batch_size=1, policy="fcfs")
    rig.tell(JobArrived(1, 8, 3))
    rig.now_ns += 5 * MS
    rig.tell(JobArrived(2, 16, 2))
    rig.done(20)
    rig.done(30)
    assert times(rig).queue.count == 0, "told when a request ends"
    rig.done(10)  # 1 ends, 5 + 20 + 30 + 10 ms after its arrival, 2 begins
    assert in_ms(times(rig).queue) == (1, 0)
    assert in_ms(times(rig).prefill) == (1, 5 + 20)
    assert in_ms(times(rig).decode) == (1, 30 + 10)
    assert in_ms(times(rig).inference) == (1, 65)
    rig.done(40)
    rig.done(10)
    assert in_ms(times(rig).queue) == (2, 60), "2 came 5 ms after 1"
    assert in_ms(times(rig).prefill) == (2, 25 + 40)
    assert in_ms(times(rig).decode) == (2, 40 + 10)
    assert in_ms(times(rig).inference) == (2, 65 + 50)
    assert (times(rig).prefill_tokens.count, times(rig).prefill_tokens.total) == (2, 8 + 16)
    rig.drain()


def test_a_prompt_in_pieces_has_one_queue_time_and_one_prefill() -> None:
    rig = Rig(100, 0, max_batch_tokens=10, prefill_chunk_tokens=10)
    rig.tell(JobArrived(1, 25, 1))
    for _ in range(3):
        rig.done(7)
    assert (in_ms(times(rig).queue), in_ms(times(rig).prefill)) == ((1, 0), (1, 21))
    assert in_ms(times(rig).decode) == (1, 0)
    assert times(rig).prefill_tokens.total == 25


def test_a_request_that_is_left_has_the_phases_that_it_came_to() -> None:
    rig = Rig(100, 0, max_batch_size=1, policy="fcfs")
    rig.tell(JobArrived(1, 8, 9))
    rig.tell(JobArrived(2, 8, 9))
    rig.now_ns += 5 * MS
    rig.tell(JobAborted(2))
    assert in_ms(times(rig).queue) == (1, 5)
    assert times(rig).prefill.count == times(rig).inference.count == 0, "it never ran"
    rig.tell(JobAborted(1))
    rig.done(20)
    assert in_ms(times(rig).queue) == (2, 5)
    assert in_ms(times(rig).prefill) == in_ms(times(rig).inference) == (1, 25)
    assert times(rig).decode.count == 0, "it had no token"
    rig.drain()


def test_a_request_that_comes_back_with_tokens_is_prefilled_to_its_next_one() -> None:
    rig = Rig(100, 0)
    rig.tell(JobArrived(1, 8, 6, output_tokens=4))
    rig.done(20)
    rig.done(10)
    assert in_ms(times(rig).prefill) == (1, 20)
    assert in_ms(times(rig).decode) == (1, 10)
    assert times(rig).prefill_tokens.total == 12
    rig.drain()


def test_what_is_computed_again_counts_as_prefill_and_the_time_goes_on() -> None:
    rig = Rig(100, 0)
    rig.tell(JobArrived(1, 8, 3))
    rig.done(20)
    rig.stage_falls()
    rig.done(20)
    rig.done(10)
    assert in_ms(times(rig).prefill) == (1, 20)
    assert in_ms(times(rig).decode) == (1, 30)
    assert times(rig).prefill_tokens.total == 8 + 9
    rig.drain()


# ---- KV


def residency(rig: Rig) -> ResidencySnapshot:
    return rig.core.snapshot().swap.residency


def one(value_ns: int) -> TallySnapshot:
    """One observation of a stay."""
    tally = Tally(STAY_BOUNDS_NS)
    tally.observe(value_ns)
    return tally.snapshot()


def counts(stays: Mapping[StayEnd, TallySnapshot]) -> dict[str, int]:
    return {end.value: tally.count for end, tally in stays.items() if tally.count}


def _pushed_out() -> Rig:
    """Job 1 of five blocks, of the six that there are, gives way to job 2."""
    rig = Rig(6, 20)
    rig.tell(JobArrived(1, 15, 9))
    for _ in range(3):
        rig.done()
    rig.tell(JobArrived(2, 9, 3))
    return rig.until(1, KvState.OUTGOING)


def test_stays_are_told_when_kv_moves() -> None:
    rig = _pushed_out()
    stayed_ns = rig.now_ns
    assert residency(rig).device[StayEnd.MOVED].count == 1
    assert residency(rig).device[StayEnd.MOVED].total == stayed_ns, "it came at 0"
    assert residency(rig).idle_before_evict == one(0), "it had run until then"
    rig.until(1, KvState.HOST)
    there_ns = rig.now_ns
    rig.now_ns += 7 * MS
    ran_ns = stayed_ns
    rig.until(1, KvState.INCOMING)
    away_ns = rig.now_ns - there_ns
    assert residency(rig).host[StayEnd.MOVED] == one(away_ns)
    assert residency(rig).reuse_gap.count == 0, "not back yet"
    rig.until(1, KvState.DEVICE)
    while not rig.core.jobs[1].in_flight:
        rig.go_on()
    assert residency(rig).reuse_gap == one(rig.now_ns - ran_ns)
    rig.drain()
    assert counts(residency(rig).device) == {"moved": 1, "finished": 2}
    assert counts(residency(rig).host) == {"moved": 1}
    assert residency(rig).reuse_gap.count == 1


def test_kv_that_is_given_up_had_been_idle_since_its_request_ran() -> None:
    rig = Rig(6, 0, kv_policy="recompute")
    rig.tell(JobArrived(1, 15, 9))
    for _ in range(3):
        rig.done()
    rig.tell(JobArrived(2, 9, 3))
    rig.until(1, KvState.ABSENT)
    assert residency(rig).device[StayEnd.DROPPED] == one(rig.now_ns)
    assert residency(rig).idle_before_evict == one(0)
    rig.drain()
    assert counts(residency(rig).device)["finished"] == 2
    assert counts(residency(rig).host) == {}
    assert residency(rig).reuse_gap.count == 0


def test_a_request_that_ends_on_the_host_ends_its_stay_there() -> None:
    rig = _pushed_out().until(1, KvState.HOST)
    rig.now_ns += 7 * MS
    since_ns = rig.core.jobs[1].kv_since_ns
    rig.tell(JobAborted(1))
    assert residency(rig).host[StayEnd.FINISHED] == one(rig.now_ns - since_ns)
    rig.drain()


def test_a_host_that_falls_drops_what_is_there() -> None:
    rig = _pushed_out().until(1, KvState.HOST)
    rig.now_ns += 7 * MS
    since_ns = rig.core.jobs[1].kv_since_ns
    rig.host_falls()
    assert residency(rig).host[StayEnd.DROPPED] == one(rig.now_ns - since_ns)
    rig.drain()


def test_swaps_are_measured_whole() -> None:
    rig = _pushed_out()
    assert rig.core.snapshot().swap.sizes[SwapDirection.OUT].count == 0, "it has not landed"
    rig.drain()
    swap = rig.core.snapshot().swap
    for direction, num_bytes in ((SwapDirection.OUT, swap.bytes_out), (SwapDirection.IN, swap.bytes_in)):
        assert swap.sizes[direction].count == 1
        assert swap.sizes[direction].total == num_bytes > 0


def test_an_outage_drops_what_was_on_the_device() -> None:
    rig = Rig(100, 0)
    rig.tell(JobArrived(1, 8, 3))
    rig.done(20)
    rig.now_ns += 3 * MS
    rig.tell(StageDown(0))
    assert residency(rig).device[StayEnd.DROPPED] == one(23 * MS)
    rig.tell(StageUp(0, 100))
    rig.drain()
