"""Finds the node's kvstore, attaches to it, maps its arena, and does so again when it has been started anew."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import grpc.aio

from fastserve.v1 import kvstore_pb2, kvstore_pb2_grpc
from fastserve_common import segments
from fastserve_common.channels import open_channel
from fastserve_common.state import DEFAULT_GROUP, StateError, StateStore
from fastserve_worker import codec
from fastserve_worker.messages import KvShape, StageInfo
from fastserve_worker.swap.host_slab import TRAILER_BYTES, HostSlab

log = logging.getLogger(__name__)

ROLE = "kvstore"

#: How often the state store is asked whether there is a kvstore, or another one.
ATTACH_POLL_S = 0.5
ATTACH_TIMEOUT_S = 5.0


class HostLink:
    """Looks after one stage's piece of its node's arena.

    A kvstore that went away takes nothing with it: the mapping stays until there is another to replace it, and it is
    the scheduler that says which slots are worth anything.
    """

    def __init__(
        self,
        store: StateStore,
        node: str,
        info: StageInfo,
        shape: KvShape,
        *,
        checksums: bool,
        replica: int = 0,
        group: str = DEFAULT_GROUP,
        use: Callable[[HostSlab], Awaitable[None]],
    ) -> None:
        """`use` is called with every slab attached to."""
        self._store = store
        self._node = node
        self._block_bytes = shape.block_bytes
        self._request = codec.attach_request(info, shape, TRAILER_BYTES if checksums else 0, replica, group)
        self._use = use
        self._attached_to: dict[str, str] = {}
        self._complaint = ""

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(ATTACH_POLL_S)

    async def refresh(self) -> None:
        """Attach if there is a kvstore that this stage is not attached to. Failures are logged, once each."""
        try:
            facts = (await self._store.members(ROLE)).get(self._node)
            if facts is None or facts == self._attached_to:
                return
            await self._use(await self._attach(facts["address"]))
        except StateError as error:
            log.debug("cannot look for a kvstore: %s", error)  # whoever registers this stage complains already
        except (grpc.aio.AioRpcError, OSError, ValueError, KeyError) as error:
            self._complain(error.details() or "" if isinstance(error, grpc.aio.AioRpcError) else repr(error))
        else:
            self._attached_to, self._complaint = facts, ""

    async def _attach(self, address: str) -> HostSlab:
        async with open_channel(address) as channel:
            stub = kvstore_pb2_grpc.KvStoreStub(channel)
            answer: kvstore_pb2.AttachResponse = await stub.Attach(self._request, timeout=ATTACH_TIMEOUT_S)
        slab = map_slab(answer, self._request.layout.slot_bytes, self._block_bytes, self._node)
        facts = {"slots": slab.num_slots, "generation": slab.generation, "segment": answer.segment}
        log.info("attached to host memory", extra=facts)
        return slab

    def _complain(self, message: str) -> None:
        if message != self._complaint:
            log.warning("no host memory for swapping, will retry: %s", message)
            self._complaint = message


def map_slab(answer: kvstore_pb2.AttachResponse, slot_bytes: int, block_bytes: int, node: str) -> HostSlab:
    """Raises OSError when the segment is gone, ValueError when it does not hold the slab."""
    memory = memoryview(segments.attach(answer.segment))
    end = answer.offset_bytes + answer.num_slots * slot_bytes
    if end > memory.nbytes:
        raise ValueError(f"{answer.segment} has {memory.nbytes} bytes, the slab ends at {end}")
    return HostSlab(
        memory[answer.offset_bytes : end], answer.num_slots, slot_bytes, block_bytes, answer.generation, node
    )
