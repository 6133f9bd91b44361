"""The ranks of a stage as their computing threads meet: sums of tensors, and whose turn it is.

A rank that computed what the others do not would wait for them for ever. So rank 0 says before each iteration which
one it begins; the others begin none of their own accord, and leave out those that rank 0 passed over.
"""

from datetime import timedelta
from typing import Protocol, cast

import torch
from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import BroadcastOptions, PrefixStore, Store, Work

from fastserve_worker.backend import Turn
from fastserve_worker.ranks.errors import TurnOverError


class _Collectives(Protocol):
    """What torch's process groups have; its own stubs leave it out."""

    def allreduce(self, tensors: list[torch.Tensor]) -> Work: ...

    def broadcast(self, tensors: list[torch.Tensor], options: BroadcastOptions) -> Work: ...


class RankGroup:
    """One rank's end. All calls come from the stage's own thread, and of every rank in the same order.

    Raises RuntimeError, from any call, when another rank is gone or does not come within `timeout_s`: the group is
    of no use from then on.
    """

    def __init__(self, store: Store, rank: int, size: int, *, device: torch.device, timeout_s: float) -> None:
        """Waits until all ranks are there. `store`: the one that all ranks of this stage use, and nobody else."""
        timeout = timedelta(seconds=timeout_s)
        self.rank, self.size = rank, size
        self._turns = cast(_Collectives, ProcessGroupGloo(PrefixStore("turns", store), rank, size, timeout))
        self._tensors = _for_tensors(PrefixStore("tensors", store), rank, size, device, timeout)
        self._announced: Turn | None = None

    def add_up(self, part: torch.Tensor) -> None:
        """Replace every rank's `part` by the sum of all."""
        self._tensors.allreduce([part]).wait()

    def share(self, tensor: torch.Tensor) -> None:
        """Replace every rank's `tensor` by that of rank 0."""
        self._tensors.broadcast([tensor], BroadcastOptions()).wait()

    def begin(self, turn: Turn) -> None:
        """Rank 0 begins `turn`; the others wait until it does. Raises TurnOverError where it has passed it over."""
        if self.rank == 0:
            self._turns.broadcast([torch.tensor(turn)], BroadcastOptions()).wait()
            return
        while self._announced is None or self._announced < turn:
            self._announced = self._hear()
        if self._announced > turn:
            raise TurnOverError(f"rank 0 is at {self._announced} already, this is {turn}")
        self._announced = None

    def _hear(self) -> Turn:
        heard = torch.zeros(3, dtype=torch.int64)
        self._turns.broadcast([heard], BroadcastOptions()).wait()
        epoch, plan, point = heard.tolist()
        return epoch, plan, point


def _for_tensors(store: Store, rank: int, size: int, device: torch.device, timeout: timedelta) -> _Collectives:
    if device.type == "cpu":
        return cast(_Collectives, ProcessGroupGloo(store, rank, size, timeout))
    # Not in every build of torch. Written after its documentation; not run yet, for lack of two devices.
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return cast(_Collectives, ProcessGroupNCCL(store, rank, size, options))
