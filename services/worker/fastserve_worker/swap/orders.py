"""Which copy may begin when. One epoch's swaps at one stage; lives on the event loop, the copies on their threads.

Three rules keep bytes right, and no lock but these is needed, because the scheduler gives blocks and slots to others
only after every stage has reported:

1. An OUT copy begins when every plan that came before its own has been computed here: one of them may still write the
   blocks.
2. A plan that computes with blocks of an IN copy waits until it has landed. It asks for blocks, not for jobs: also a
   job that got a block while an abandoned copy still writes it is safe.
3. When the epoch ends, copies that have not begun do nothing, those that have stop at the next block, and whoever ends
   the epoch waits for them.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable

from fastserve_common.packed import unpack_u32
from fastserve_worker.errors import PlanError
from fastserve_worker.messages import Plan, SwapDirection, SwapOrder
from fastserve_worker.swap.copier import MAX_OUTSTANDING_SWAPS, Copier, Copy
from fastserve_worker.swap.host_slab import HostSlab

#: Blocks of unfinished swaps, in pools: every block out and every block in. Who orders more has lost count.
MAX_OUTSTANDING_POOLS = 2


class AwaitedCopies:
    """What one plan waits for before it computes."""

    def __init__(self, copies: tuple[Copy, ...]) -> None:
        self._copies = copies

    def wait(self) -> int:
        """Nanoseconds that it took. On the stage's thread. Raises PlanError when one of them failed."""
        begin_ns = time.perf_counter_ns()
        for copy in self._copies:
            copy.landed.wait()
            if copy.error:
                raise PlanError(f"it computes with blocks of swap {copy.order.swap_id}: {copy.error}")
        return time.perf_counter_ns() - begin_ns if self._copies else 0


class SwapOrders:
    """`on_landed` hears of every copy that ended, well or not, until `stop`."""

    def __init__(self, copier: Copier, num_blocks: int, on_landed: Callable[[Copy], None]) -> None:
        self._copier = copier
        self._num_blocks = num_blocks
        self._on_landed = on_landed
        self._stopped = threading.Event()
        self._num_arrived = 0
        self._num_computed = 0
        self._num_outstanding_blocks = 0
        #: OUT copies that wait for plans, with the number of plans that must have been computed.
        self._held: deque[tuple[int, Copy]] = deque()
        self._running: dict[Copy, asyncio.Future[None]] = {}
        self._awaited: dict[int, AwaitedCopies] = {}

    def check(self, plan: Plan) -> None:
        """Raises PlanError for more than this stage takes at a time."""
        if len(self._held) + len(self._running) + len(plan.swaps) > MAX_OUTSTANDING_SWAPS:
            raise PlanError(f"more than {MAX_OUTSTANDING_SWAPS} swaps are unfinished at this stage")
        num_blocks = self._num_outstanding_blocks + sum(len(order.device_blocks) for order in plan.swaps)
        if num_blocks > MAX_OUTSTANDING_POOLS * self._num_blocks:
            raise PlanError(f"unfinished swaps of {num_blocks} blocks at a stage that has {self._num_blocks}")

    def take(self, plan: Plan, slab: HostSlab | None) -> None:
        """The plan has come: its copies begin now, or are held. `slab` is where its slots are."""
        copies = [self._copy(order, plan, slab) for order in plan.swaps]
        for copy in copies:
            self._num_outstanding_blocks += len(copy.order.device_blocks)
            if copy.landed.is_set():
                self._end(copy)
            elif copy.order.direction is SwapDirection.IN:
                self._start(copy)
            else:
                self._held.append((self._num_arrived, copy))
        self._awaited[plan.seq] = AwaitedCopies(self._needed_by(plan, copies))
        self._num_arrived += 1
        self._release()

    def awaited_by(self, plan: Plan) -> AwaitedCopies:
        """Once for each plan taken."""
        return self._awaited.pop(plan.seq)

    def computed(self) -> None:
        """One more plan has been computed, in the order in which they came."""
        self._num_computed += 1
        self._release()

    def stop(self) -> None:
        """Nothing is started or reported from now on; a thread that waits for a copy is let go."""
        self._stopped.set()
        self._held.clear()

    async def wait_landed(self) -> None:
        """After `stop`: from then on no copy of this epoch touches a block or a slot."""
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    def _copy(self, order: SwapOrder, plan: Plan, slab: HostSlab | None) -> Copy:
        if slab is None:
            return Copy.refused(order, "this stage is attached to no host memory")
        if plan.host_generation not in (0, slab.generation):
            return Copy.refused(
                order, f"host memory is of generation {slab.generation}, the swap of {plan.host_generation}"
            )
        return Copy(order, slab, self._stopped)

    def _needed_by(self, plan: Plan, copies: list[Copy]) -> tuple[Copy, ...]:
        incoming = [c for c in {**dict.fromkeys(copies), **self._running} if c.order.direction is SwapDirection.IN]
        if not incoming or not plan.rows:
            return ()
        blocks = {block for row in plan.rows for block in unpack_u32(row.block_table)}
        return tuple(copy for copy in incoming if not blocks.isdisjoint(copy.order.device_blocks))

    def _release(self) -> None:
        while not self._stopped.is_set() and self._held and self._held[0][0] <= self._num_computed:
            self._start(self._held.popleft()[1])

    def _start(self, copy: Copy) -> None:
        done = self._running[copy] = self._copier.start(copy)
        done.add_done_callback(lambda _: self._landed(copy))

    def _landed(self, copy: Copy) -> None:
        del self._running[copy]
        self._end(copy)

    def _end(self, copy: Copy) -> None:
        self._num_outstanding_blocks -= len(copy.order.device_blocks)
        if not self._stopped.is_set():
            self._on_landed(copy)
