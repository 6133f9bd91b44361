"""The seam between the service and what computes: the real engine or the fake stage."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from fastserve_worker.messages import Activations, KvShape, Plan, ProfilePoint, StageInfo, StageOutput, SwapOrder
from fastserve_worker.swap.host_slab import HostSlab

#: (device block, the bytes of a host slot)
CopyBlock = Callable[[int, memoryview], None]

#: (epoch, plan, profile points since that plan): rises with everything that a stage computes.
Turn = tuple[int, int, int]


class BlockMemory(Protocol):
    """The device's side of swapping: blocks of the KV pool as bytes. Two threads use it, one per direction."""

    @property
    def shape(self) -> KvShape: ...

    def attach(self, slab: HostSlab) -> None:
        """Called once before the first copy to or from `slab`, on a thread that may wait: to pin its memory."""

    def copies(self, order: SwapOrder) -> AbstractContextManager[CopyBlock]:
        """Gives what copies one block in the order's direction. All copies have landed when the context is left."""


class StageBackend(Protocol):
    """Everything is called on the stage's own thread, one call at a time, except `info` and `memory`."""

    @property
    def info(self) -> StageInfo: ...

    @property
    def memory(self) -> BlockMemory: ...

    def start_epoch(self, epoch: int) -> None:
        """Everything in the KV pool is void: the scheduler will prefill again."""

    def run(self, plan: Plan, activations: Activations | None) -> StageOutput:
        """Compute one iteration. `activations` is None on the first stage.

        Raises any exception when the plan cannot be carried out; the stage stays usable.
        """

    def profile(self, point: ProfilePoint, turn: Turn) -> int:
        """Nanoseconds of one iteration of this shape on this stage alone; KV of live jobs is untouched.

        `turn`: its place among the iterations. Raises ValueError for a point that can never run.
        """
