"""How the ranks of a stage find each other: rank 0 says in the cluster state where, the others come there.

The place is new whenever rank 0 is: ranks that lost one of them end, are started again, and meet anew.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch._C._distributed_c10d import TCPStore

from fastserve_common.state import StateError, StateStore, membership, stage_member
from fastserve_worker.ranks.group import RankGroup
from fastserve_worker.settings import WorkerSettings

log = logging.getLogger(__name__)

#: Role under which rank 0 says where the others come.
MEETING_ROLE = "rank-meeting"

#: For one rank to come after another: loading and a restart lie between.
MEETING_TIMEOUT_S = 600.0
POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Meeting:
    """A place where all ranks of the stage are, or are about to come."""

    store: TCPStore
    settings: WorkerSettings

    def join(self, device: torch.device) -> RankGroup:
        """Waits for all ranks; on a thread that may. Raises RuntimeError when they do not come."""
        wanted = self.settings
        size = wanted.tensor_parallel_size
        group = RankGroup(self.store, wanted.tensor_parallel_rank, size, device=device, timeout_s=wanted.stall_timeout)
        log.info("met the other ranks", extra={"rank": wanted.tensor_parallel_rank, "of_ranks": size})
        return group

    async def addresses(self) -> list[str]:
        """Where ranks 1, 2, ... listen. After `join`, when they have said so."""
        keys = [_address_key(rank) for rank in range(1, self.settings.tensor_parallel_size)]
        return [(await asyncio.to_thread(self.store.get, key)).decode() for key in keys]


@contextlib.asynccontextmanager
async def meeting(state: StateStore, settings: WorkerSettings, address: str) -> AsyncIterator[Meeting]:
    """`address`: where this rank listens. Raises OSError or RuntimeError when the place is not to be had."""
    member = stage_member(settings.replica, settings.stage, settings.group)
    timeout = timedelta(seconds=MEETING_TIMEOUT_S)
    size, host = settings.tensor_parallel_size, address.rpartition(":")[0]
    if settings.tensor_parallel_rank == 0:
        store = TCPStore(host, 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
        async with membership(state, MEETING_ROLE, member, {"address": f"{host}:{store.port}"}):
            yield Meeting(store, settings)
        return
    host, port = await _place(state, member)

    def come() -> TCPStore:
        store = TCPStore(host, port, size, is_master=False, timeout=timeout, wait_for_workers=False)
        store.set(_address_key(settings.tensor_parallel_rank), address)
        return store

    yield Meeting(await asyncio.to_thread(come), settings)


async def _place(state: StateStore, member: str) -> tuple[str, int]:
    """Where rank 0 is, once it answers there: what an earlier one left behind does not."""
    while True:
        with contextlib.suppress(StateError, OSError):
            info = (await state.members(MEETING_ROLE)).get(member)
            if info is not None:
                host, _, port = info["address"].rpartition(":")
                _, writer = await asyncio.open_connection(host, int(port))
                writer.close()
                return host, int(port)
        await asyncio.sleep(POLL_S)


def _address_key(rank: int) -> str:
    return f"address-of-rank-{rank}"
