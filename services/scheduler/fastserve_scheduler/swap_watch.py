"""Swaps that stages have not reported yet: whose report is new, and who has been silent for too long. Pure.

A stage copies in order, one queue per direction, so the time that counts is the one since the swap before in its queue
has landed: many swaps may wait, none may be forgotten. An OUT copy also waits for the plans that came before its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fastserve_scheduler.core.commands import SwapDirection, SwapOp


@dataclass(slots=True, eq=False)
class SentSwap:
    """`seq`: of the wire plan that carries it. `epoch`: the core's."""

    seq: int
    epoch: int
    direction: SwapDirection
    since_ns: int
    job_id: int


class SwapWatch:
    """One queue per stage and direction."""

    def __init__(self, num_stages: int) -> None:
        self._queues: dict[tuple[int, SwapDirection], dict[int, SentSwap]] = {
            (stage, direction): {} for stage in range(num_stages) for direction in SwapDirection
        }

    @property
    def num_unreported(self) -> int:
        """Reports that are still to come: one per swap and stage."""
        return sum(len(queue) for queue in self._queues.values())

    def sent(self, seq: int, epoch: int, ops: Sequence[SwapOp], now_ns: int) -> None:
        """The plan `seq` is on its way to the stages."""
        for (_, direction), queue in self._queues.items():
            for op in ops:
                if op.direction is direction:
                    queue[op.swap_id] = SentSwap(seq, epoch, direction, now_ns, op.job_id)

    def reported(self, swap_id: int, stage: int, now_ns: int) -> SentSwap | None:
        """The swap that `stage` reports; None when it owes no report of it."""
        for direction in SwapDirection:
            queue = self._queues.get((stage, direction), {})
            head, swap = _head(queue), queue.pop(swap_id, None)
            if swap is None:
                continue
            if swap is head and (following := _head(queue)) is not None:
                following.since_ns = now_ns
            return swap
        return None

    def computed(self, stage: int, seq: int, now_ns: int) -> None:
        """`stage` has computed plan `seq`: OUT copies of later plans did not have their turn before."""
        head = _head(self._queues.get((stage, SwapDirection.OUT), {}))
        if head is not None and head.seq > seq:
            head.since_ns = now_ns

    def overdue(
        self, timeout_ns: int, now_ns: int, computed_before: Callable[[int, int], bool]
    ) -> tuple[int, int, int] | None:
        """(stage, swap, how long in ns) of a stage that has been silent about a swap for longer than `timeout_ns`.

        `computed_before(seq, stage)`: whether the stage has computed everything sent before plan `seq`.
        """
        for (stage, direction), queue in self._queues.items():
            head = _head(queue)
            if head is None or now_ns - head.since_ns <= timeout_ns:
                continue
            if direction is SwapDirection.IN or computed_before(head.seq, stage):
                return stage, next(iter(queue)), now_ns - head.since_ns
        return None

    def clear(self) -> None:
        """The epoch is over: nobody reports its swaps any more."""
        for queue in self._queues.values():
            queue.clear()


def _head(queue: dict[int, SentSwap]) -> SentSwap | None:
    return next(iter(queue.values()), None)
