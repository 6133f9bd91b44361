"""One Control stream to a kvstore, from hello to its end: slots are leased ahead, kept and freed; never waits."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import cast

import grpc.aio

from fastserve_common.channels import open_channel
from fastserve_scheduler import kv_codec
from fastserve_scheduler.kv_messages import (
    HostArena,
    KvCommand,
    KvEvent,
    KvHello,
    KvReady,
    KvRefused,
    SlotsExpired,
    SlotsLeased,
)
from fastserve_scheduler.slot_book import SlotBook, SlotBookError

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
#: For a kvstore that does not say how long its leases live.
DEFAULT_LEASE_TTL_S = 30.0
#: A lease is renewed this many times in its life.
RENEWALS_PER_LEASE = 4
#: Commands that wait for the kvstore to take them; more means that it does not read.
MAX_UNSENT_COMMANDS = 65_536

_MS_PER_S = 1000


class KvSessionError(Exception):
    """The stream is of no use any more, and why."""


class KvSession:
    """`on_granted` hears of slots as they are leased. Every slot of the arena is free when it begins."""

    def __init__(self, arena: HostArena, hello: KvHello, on_granted: Callable[[tuple[int, ...]], None]) -> None:
        self.arena = arena
        self.closed = False
        self._hello = hello
        self._on_granted = on_granted
        self._book: SlotBook | None = None
        self._unsent: asyncio.Queue[KvCommand] = asyncio.Queue()
        self._renewals: asyncio.Task[None] | None = None

    @property
    def generation(self) -> int:
        return self.arena.generation

    @property
    def opened(self) -> bool:
        """Slots have been asked for."""
        return self._book is not None

    def keep(self, job_id: int, slots: Sequence[int]) -> None:
        """The job's KV is in these slots, on every stage."""
        if self._book is not None:
            self._send(self._book.keep(job_id, slots))

    def free(self, job_id: int, slots: Sequence[int]) -> None:
        """The job does not need these slots any more."""
        if self._book is not None:
            self._send(self._book.free(job_id, slots))

    async def run(self, address: str) -> None:
        """Until the stream is of no use any more; says why by KvSessionError, AioRpcError or TimeoutError."""
        try:
            async with open_channel(address) as channel:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await channel.channel_ready()
                await self._talk(channel)
        finally:
            self.closed = True
            if self._renewals is not None:
                self._renewals.cancel()

    def _send(self, commands: Sequence[KvCommand]) -> None:
        if self.closed or self._unsent.qsize() > MAX_UNSENT_COMMANDS:
            return  # the kvstore will refuse what no longer fits, or end the lease: either ends the session
        for command in commands:
            self._unsent.put_nowait(command)

    async def _talk(self, channel: grpc.aio.Channel) -> None:
        method = channel.stream_stream(
            kv_codec.KV_CONTROL_METHOD,
            request_serializer=kv_codec.kv_command_to_wire,
            response_deserializer=kv_codec.kv_event_from_wire,
        )
        call = method()
        self._unsent.put_nowait(self._hello)
        writer = asyncio.create_task(self._write(call), name="kvstore-commands")
        try:
            while (event := await call.read()) is not grpc.aio.EOF:
                self._take(cast(KvEvent, event))
            status = await call.code()
            raise KvSessionError(f"it ended the stream ({status.name.lower()}: {await call.details()})")
        finally:
            writer.cancel()
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                await writer

    async def _write(self, call: "grpc.aio.StreamStreamCall[KvCommand, KvEvent]") -> None:
        try:
            while True:
                await call.write(await self._unsent.get())
        except asyncio.InvalidStateError:
            pass  # the stream has ended; the reader says why

    def _take(self, event: KvEvent) -> None:
        match event:
            case KvReady():
                self._ready(event)
            case SlotsLeased(slots) if self._book is not None:
                try:
                    granted = self._book.leased(slots)
                except SlotBookError as error:
                    raise KvSessionError(str(error)) from error
                if granted:
                    self._on_granted(granted)
            case SlotsExpired(slots):
                raise KvSessionError(f"the lease of {len(slots)} slots was not renewed in time")
            case KvRefused(message):
                raise KvSessionError(f"it refused a command: {message}")
            case _:
                pass  # of a newer kvstore

    def _ready(self, ready: KvReady) -> None:
        """The stages' arena, or not yet: a kvstore that was started again may be heard before the stages are."""
        same = (ready.generation, ready.total_slots) == (self.arena.generation, self.arena.num_slots)
        if self._book is not None and not same:
            raise KvSessionError("it began a new generation")
        if self._book is None and same:
            self._book = SlotBook(ready.total_slots)
            self._send(self._book.open())
            ttl_s = ready.lease_ttl_ms / _MS_PER_S or DEFAULT_LEASE_TTL_S
            self._renewals = asyncio.create_task(self._renew(ttl_s / RENEWALS_PER_LEASE), name="kvstore-renewals")

    async def _renew(self, period_s: float) -> None:
        while self._book is not None:
            await asyncio.sleep(period_s)
            self._send(self._book.renew())
