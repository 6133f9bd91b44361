"""Which reports of swaps count, and which silence is too long."""

from fastserve_scheduler.core.commands import SwapDirection, SwapOp
from fastserve_scheduler.swap_watch import SwapWatch

TIMEOUT_NS = 100


def _op(swap_id: int, direction: SwapDirection = SwapDirection.OUT) -> SwapOp:
    return SwapOp(swap_id, 1, direction, (0,), (0,))


def _computed(seq: int, stage: int) -> bool:
    return True


def test_every_stage_reports_every_swap_once() -> None:
    watch = SwapWatch(2)
    watch.sent(1, 7, [_op(0), _op(1, SwapDirection.IN)], now_ns=0)
    assert watch.num_unreported == 4
    reported = watch.reported(1, 1, 5)
    assert reported is not None
    assert (reported.epoch, reported.direction) == (7, SwapDirection.IN)
    assert watch.reported(1, 1, 6) is None
    assert watch.reported(1, 0, 6) is not None
    assert watch.reported(0, 2, 6) is None, "there is no such stage"
    assert watch.reported(9, 0, 6) is None
    assert watch.num_unreported == 2
    watch.clear()
    assert watch.reported(0, 0, 7) is None


def test_a_stage_that_stays_silent_is_named() -> None:
    watch = SwapWatch(2)
    watch.sent(1, 0, [_op(0)], now_ns=0)
    watch.reported(0, 0, 50)
    assert watch.overdue(TIMEOUT_NS, 100, _computed) is None
    assert watch.overdue(TIMEOUT_NS, 101, _computed) == (1, 0, 101)


def test_the_time_of_a_swap_begins_when_the_one_before_it_has_landed() -> None:
    watch = SwapWatch(1)
    watch.sent(1, 0, [_op(n) for n in range(3)], now_ns=0)
    watch.reported(0, 0, 90)
    watch.reported(1, 0, 180)
    assert watch.overdue(TIMEOUT_NS, 280, _computed) is None
    assert watch.overdue(TIMEOUT_NS, 281, _computed) == (0, 2, 101)


def test_later_swaps_do_not_hide_a_lost_report() -> None:
    watch = SwapWatch(1)
    watch.sent(1, 0, [_op(0), _op(1)], now_ns=0)
    watch.reported(1, 0, 60)
    watch.sent(2, 0, [_op(2), _op(3, SwapDirection.IN)], now_ns=90)
    watch.reported(2, 0, 99)
    watch.reported(3, 0, 99)
    assert watch.overdue(TIMEOUT_NS, 101, _computed) == (0, 0, 101)


def test_an_out_copy_is_not_late_while_plans_before_it_are_computed() -> None:
    watch = SwapWatch(1)
    watch.sent(5, 0, [_op(0)], now_ns=0)
    assert watch.overdue(TIMEOUT_NS, 500, lambda seq, stage: (seq, stage) != (5, 0)) is None
    watch.computed(0, 4, 500)
    assert watch.overdue(TIMEOUT_NS, 600, _computed) is None
    watch.computed(0, 5, 590)
    assert watch.overdue(TIMEOUT_NS, 601, _computed) == (0, 0, 101)


def test_an_in_copy_waits_for_no_plan() -> None:
    watch = SwapWatch(1)
    watch.sent(5, 0, [_op(0, SwapDirection.IN)], now_ns=0)
    watch.computed(0, 4, 100)
    assert watch.overdue(TIMEOUT_NS, 101, lambda seq, stage: False) == (0, 0, 101)
