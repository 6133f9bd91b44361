"""The kvstore's gRPC face. One event loop owns the store; nothing here blocks."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator

from fastserve.v1 import kvstore_pb2 as pb
from fastserve.v1 import kvstore_pb2_grpc
from fastserve_common.errors import (
    Context,
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
)
from fastserve_kvstore import codec
from fastserve_kvstore.arena import Arena
from fastserve_kvstore.messages import Event, Hello
from fastserve_kvstore.slabs import SlabError
from fastserve_kvstore.store import HostStore, SupersededError

log = logging.getLogger(__name__)

#: Events a scheduler may leave unread before its stream is ended; it comes back and says hello again.
MAX_UNREAD_EVENTS = 4096


class _Session:
    """One scheduler's stream: what it has still to hear. None ends it."""

    def __init__(self) -> None:
        self.outbox: asyncio.Queue[Event | None] = asyncio.Queue(MAX_UNREAD_EVENTS)

    def tell(self, *events: Event) -> None:
        for event in events:
            try:
                self.outbox.put_nowait(event)
            except asyncio.QueueFull:
                log.warning("the scheduler does not read its events; ending its stream")
                self.end()
                return

    def end(self) -> None:
        """What is unread is worth nothing to a scheduler that has to say hello again."""
        while not self.outbox.empty():
            self.outbox.get_nowait()
        self.outbox.put_nowait(None)


class KvStoreService(kvstore_pb2_grpc.KvStoreServicer):
    """Attach, Control and GetStatus over one `HostStore`."""

    def __init__(self, store: HostStore, arena: Arena) -> None:
        self._store = store
        self._arena = arena
        self._session: _Session | None = None
        self._leases_changed = asyncio.Event()

    async def Attach(self, request: pb.AttachRequest, context: Context) -> pb.AttachResponse:
        if not request.owner or not request.HasField("layout"):
            raise InvalidArgumentError("owner and layout must be set", param="layout")
        layout = codec.decode_layout(request.layout)
        try:
            slab, changed = self._store.attach(request.owner, layout, request.pipeline_slot_bytes)
        except SlabError as error:
            raise ResourceExhaustedError(str(error)) from error
        if changed:
            log.info(
                "slab attached",
                extra={"owner": slab.owner, "slots": slab.num_slots, "slot_bytes": layout.slot_bytes},
            )
            self._tell(self._store.ready)
        return pb.AttachResponse(
            segment=self._arena.name,
            offset_bytes=slab.offset_bytes,
            num_slots=slab.num_slots,
            generation=self._store.generation,
            page_locked=self._arena.page_locked,
        )

    async def Control(
        self, request_iterator: AsyncIterator[pb.KvCommand], context: Context
    ) -> AsyncIterator[pb.KvEvent]:
        session = await self._open(request_iterator)
        reader = asyncio.create_task(self._read(request_iterator, session))
        try:
            while (event := await session.outbox.get()) is not None:
                yield codec.encode_event(event)
            if reader.done():
                reader.result()
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            if self._session is session:
                self._session = None
                self._store.goodbye()

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        ledger = self._store.ledger
        return pb.GetStatusResponse(
            generation=self._store.generation,
            segment=self._arena.name,
            arena_bytes=self._arena.kv_bytes,
            total_slots=ledger.num_slots,
            free_slots=ledger.num_free,
            reserved_slots=ledger.num_reserved,
            committed_slots=ledger.num_committed,
            page_locked=self._arena.page_locked,
            slabs=[codec.encode_layout(slab.layout) for slab in self._store.slabs],
        )

    async def expire_leases(self) -> None:
        """Takes back what ran out, for as long as it runs. Wakes for the oldest lease, not by polling."""
        while True:
            self._tell(*self._store.expire(time.monotonic_ns()))
            self._leases_changed.clear()
            expiry_ns = self._store.ledger.next_expiry_ns
            wait_s = None if expiry_ns is None else max(0, expiry_ns - time.monotonic_ns()) / 1e9
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._leases_changed.wait(), wait_s)

    def close(self) -> None:
        """End the scheduler's stream."""
        if self._session is not None:
            self._session.end()

    async def _open(self, requests: AsyncIterator[pb.KvCommand]) -> _Session:
        first = await anext(aiter(requests), None)
        hello = None if first is None else codec.decode_command(first)
        if not isinstance(hello, Hello) or not hello.scheduler_id:
            raise InvalidArgumentError("the first message of a Control stream must be a hello", param="hello")
        try:
            ready = self._store.hello(hello)
        except SupersededError as error:
            raise FailedPreconditionError(str(error)) from error
        if self._session is not None:
            self._session.end()
        self._session = _Session()
        self._session.tell(ready)
        self._leases_changed.set()
        log.info("scheduler connected", extra={"scheduler": hello.scheduler_id, "epoch": hello.epoch})
        return self._session

    async def _read(self, requests: AsyncIterator[pb.KvCommand], session: _Session) -> None:
        try:
            async for message in requests:
                if self._session is not session:
                    return  # a newer stream owns the slots
                self._handle(message, session)
        finally:
            session.end()

    def _handle(self, message: pb.KvCommand, session: _Session) -> None:
        command = codec.decode_command(message)
        if isinstance(command, Hello):
            raise InvalidArgumentError("a hello may only come first", param="hello")
        if command is not None:
            session.tell(*self._store.apply(command, time.monotonic_ns()))
            self._leases_changed.set()

    def _tell(self, *events: Event) -> None:
        if self._session is not None:
            self._session.tell(*events)
