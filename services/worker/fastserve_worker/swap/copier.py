"""Two threads that copy, one per direction, so that both directions of the link work at once and compute goes on."""

import asyncio
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from fastserve_worker.backend import BlockMemory
from fastserve_worker.messages import SwapDirection, SwapOrder
from fastserve_worker.runner import StageRunner
from fastserve_worker.swap.host_slab import HostSlab

log = logging.getLogger(__name__)

#: Swaps that a stage has taken and not finished, both directions together.
MAX_OUTSTANDING_SWAPS = 1024


class CopyStoppedError(Exception):
    """The epoch ended before the copy did."""


@dataclass(eq=False, slots=True)
class Copy:
    """One swap on its way. The copy's thread writes what is below `landed` before it sets that.

    `begin_ns`: by the monotonic clock; 0: it has not begun.
    """

    order: SwapOrder
    slab: HostSlab | None
    #: Set when the epoch is over; shared by all its copies.
    stopped: threading.Event
    landed: threading.Event = field(default_factory=threading.Event)
    num_bytes: int = 0
    begin_ns: int = 0
    copy_ns: int = 0
    error: str = ""

    @classmethod
    def refused(cls, order: SwapOrder, reason: str) -> "Copy":
        """A copy that ends before it has begun."""
        copy = cls(order, None, threading.Event(), error=reason)
        copy.landed.set()
        return copy


@dataclass(slots=True)
class DirectionCounters:
    """Of one direction since the process began. `copy_ns` is time in copies, not waiting for them to begin."""

    in_flight: int = 0
    finished: int = 0
    failed: int = 0
    num_bytes: int = 0
    copy_ns: int = 0


class Copier:
    """Carries out copies in the order in which they are started, per direction. Started from the event loop."""

    def __init__(self, memory: BlockMemory) -> None:
        self.memory = memory
        #: Time for which the stage's thread waited for copies that a plan needed.
        self.blocked_ns = 0
        self.counters: Mapping[SwapDirection, DirectionCounters] = {d: DirectionCounters() for d in SwapDirection}
        self._threads = {d: StageRunner(f"copy-{d}", MAX_OUTSTANDING_SWAPS) for d in SwapDirection}

    def start(self, copy: Copy) -> "asyncio.Future[None]":
        """Done when the copy has landed or failed; it never raises, and must not be cancelled: set `stopped`."""
        done = self._threads[copy.order.direction].submit(partial(self._carry_out, copy))
        self.counters[copy.order.direction].in_flight += 1
        done.add_done_callback(lambda _: self._count(copy))
        return done

    async def close(self, timeout_s: float) -> bool:
        """False when a copy did not end within `timeout_s`."""
        return all(await asyncio.gather(*(thread.close(timeout_s) for thread in self._threads.values())))

    def _carry_out(self, copy: Copy) -> None:
        copy.begin_ns = time.monotonic_ns()
        try:
            copy.num_bytes = self._copy_blocks(copy)
        except CopyStoppedError:
            copy.error = "its epoch is over"
        except Exception as error:
            log.warning("swap %d failed: %s", copy.order.swap_id, error)
            copy.error = str(error) or type(error).__name__
        copy.copy_ns = time.monotonic_ns() - copy.begin_ns
        copy.landed.set()

    def _copy_blocks(self, copy: Copy) -> int:
        """Bytes copied. A checksum is made of what has landed on the host, and compared before anything leaves it."""
        order, slab = copy.order, copy.slab
        assert slab is not None
        pairs = tuple(zip(order.device_blocks, order.host_slots, strict=True))
        if order.direction is SwapDirection.IN and slab.has_trailers:
            for slot in order.host_slots:
                _check_going_on(copy)
                slab.verify(slot, order.job_id)
        with self.memory.copies(order) as copy_block:
            for block, slot in pairs:
                _check_going_on(copy)
                copy_block(block, slab.slot(slot))
        if order.direction is SwapDirection.OUT and slab.has_trailers:
            for slot in order.host_slots:
                slab.seal(slot, order.job_id)
        return len(pairs) * slab.block_bytes

    def _count(self, copy: Copy) -> None:
        counters = self.counters[copy.order.direction]
        counters.in_flight -= 1
        counters.finished += 1
        counters.failed += bool(copy.error)
        counters.num_bytes += copy.num_bytes
        counters.copy_ns += copy.copy_ns


def _check_going_on(copy: Copy) -> None:
    """Between blocks, so that a new epoch waits for one block at most."""
    if copy.stopped.is_set():
        raise CopyStoppedError
