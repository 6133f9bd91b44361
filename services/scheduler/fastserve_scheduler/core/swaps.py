"""Swaps under way: which copies were ordered and which stages have not reported them yet."""

from dataclasses import dataclass

from fastserve_scheduler.core.commands import SwapDirection, SwapOp
from fastserve_scheduler.core.events import SwapDone
from fastserve_scheduler.core.job import Job


@dataclass(slots=True, eq=False)
class Swap:
    """One ordered swap. Blocks and slots of `op` belong to it until every stage has reported, or the epoch rises."""

    op: SwapOp
    job: Job
    #: Stages that have not reported.
    awaited: list[bool]
    ok: bool = True
    #: The host store fell since: the slots are not ours any more.
    void: bool = False
    num_bytes: int = 0
    #: Of the slowest stage.
    copy_ns: int = 0

    @property
    def good(self) -> bool:
        return self.ok and not self.void


class Swaps:
    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self._next_id = 1
        self._by_id: dict[int, Swap] = {}
        self._unsent: list[SwapOp] = []
        #: Blocks under way.
        self.blocks = dict.fromkeys(SwapDirection, 0)
        self.count = dict.fromkeys(SwapDirection, 0)

    def __len__(self) -> int:
        return len(self._by_id)

    def order(self, job: Job, direction: SwapDirection, blocks: tuple[int, ...], slots: tuple[int, ...]) -> SwapOp:
        """A new swap, to leave with the next plan."""
        op = SwapOp(self._next_id, job.job_id, direction, blocks, slots)
        self._next_id += 1
        self._by_id[op.swap_id] = Swap(op, job, [True] * self._num_stages)
        self._unsent.append(op)
        self.blocks[direction] += len(blocks)
        self.count[direction] += 1
        return op

    def unsent(self) -> bool:
        return bool(self._unsent)

    def depart(self) -> tuple[SwapOp, ...]:
        """The orders for the next plan."""
        ops, self._unsent = tuple(self._unsent), []
        return ops

    def report(self, event: SwapDone) -> Swap | None:
        """Book one stage's report; the swap when it was the last one. Repeated and unknown reports mean nothing."""
        swap = self._by_id.get(event.swap_id)
        if swap is None or not swap.awaited[event.stage]:
            return None
        swap.awaited[event.stage] = False
        swap.ok = swap.ok and event.ok
        swap.num_bytes += event.num_bytes
        swap.copy_ns = max(swap.copy_ns, event.copy_ns)
        if any(swap.awaited):
            return None
        self._end(swap)
        return swap

    def end_all(self) -> tuple[Swap, ...]:
        """The epoch rose: no copy ordered before it will land any more."""
        ended = self.all()
        for swap in ended:
            self._end(swap)
        self._unsent.clear()
        return ended

    def all(self) -> tuple[Swap, ...]:
        return tuple(self._by_id.values())

    def _end(self, swap: Swap) -> None:
        del self._by_id[swap.op.swap_id]
        self.blocks[swap.op.direction] -= len(swap.op.device_blocks)
        self.count[swap.op.direction] -= 1
