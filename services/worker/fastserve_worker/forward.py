"""The stream from one stage to the next: plans at once, activations in chunks as they are computed."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator

import grpc
import grpc.aio

from fastserve.v1 import stage_pb2, stage_pb2_grpc
from fastserve_common.channels import open_channel
from fastserve_common.errors import ResourceExhaustedError
from fastserve_worker import codec
from fastserve_worker.messages import Activations

log = logging.getLogger(__name__)

#: Plans and activations of plans that wait to be written to the next stage.
MAX_QUEUED_MESSAGES = 64
#: The next stage is a member already when its address is given to us, so it listens or it is dead.
CONNECT_TIMEOUT_S = 10.0
#: The next stage takes activations on its event loop, whatever it computes meanwhile.
ACK_TIMEOUT_S = 15.0

_Outgoing = Iterator[stage_pb2.ForwardMessage]


class ForwardLink:
    """A link of one epoch. When it breaks it stays broken and says so once: what was in flight is lost with it, so
    only a new epoch can repair it."""

    def __init__(
        self,
        address: str,
        *,
        epoch: int,
        from_stage: int,
        on_broken: Callable[[str], None],
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        ack_timeout_s: float = ACK_TIMEOUT_S,
    ) -> None:
        self._address = address
        self._epoch = epoch
        self._from_stage = from_stage
        self._on_broken = on_broken
        self._connect_timeout_s = connect_timeout_s
        self._ack_timeout_s = ack_timeout_s
        self._outbox: asyncio.Queue[_Outgoing] = asyncio.Queue(MAX_QUEUED_MESSAGES)
        self._unacknowledged = 0
        self._deadline: asyncio.Timeout | None = None
        self._task = asyncio.create_task(self._run(), name=f"forward-{from_stage}")

    def send_plan(self, plan: stage_pb2.IterationPlan) -> None:
        """Raises ResourceExhaustedError when the next stage does not keep up."""
        try:
            self._outbox.put_nowait(iter((codec.forward_plan(plan),)))
        except asyncio.QueueFull as error:
            raise ResourceExhaustedError(f"more than {MAX_QUEUED_MESSAGES} messages wait for the next stage") from error

    async def send_activations(self, seq: int, activations: Activations) -> None:
        """Waits while the next stage does not keep up. Chunks are cut as they are written."""
        self._unacknowledged += 1
        self._watch()
        await self._outbox.put(codec.forward_activations(seq, self._epoch, activations))

    def abandon(self) -> None:
        """Stop now; `wait_closed` tells when it has."""
        self._task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            async with open_channel(self._address) as channel:
                await self._connect(channel)
                await self._exchange(stage_pb2_grpc.StageStub(channel).Forward())
            reason = "it closed the stream"
        except grpc.aio.AioRpcError as error:
            reason = error.details() or error.code().name
        except TimeoutError as error:
            reason = str(error)
        self._on_broken(f"the link to the next stage at {self._address} broke: {reason}")

    async def _connect(self, channel: grpc.aio.Channel) -> None:
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await channel.channel_ready()
        except TimeoutError:
            raise TimeoutError(f"no connection within {self._connect_timeout_s:g} s") from None

    async def _exchange(self, call: "_ForwardCall") -> None:
        """Until the stream ends. The reader sees every end, so the writer's own errors tell nothing new."""
        writer = asyncio.create_task(self._write(call))
        try:
            async with asyncio.timeout(None) as self._deadline:
                self._watch()
                async for _ in _acknowledgements(call):
                    self._unacknowledged -= 1
                    self._watch()
        except TimeoutError:
            raise TimeoutError(f"activations were not taken within {self._ack_timeout_s:g} s") from None
        finally:
            self._deadline = None
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    async def _write(self, call: "_ForwardCall") -> None:
        try:
            await call.write(codec.forward_hello(self._epoch, self._from_stage))
            while True:
                for message in await self._outbox.get():
                    await call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            log.debug("cannot write to the next stage: %s", error)

    def _watch(self) -> None:
        """Begin, renew or end the wait for an acknowledgement."""
        if self._deadline is not None and not self._deadline.expired():
            now_s = asyncio.get_running_loop().time()
            self._deadline.reschedule(now_s + self._ack_timeout_s if self._unacknowledged else None)


_ForwardCall = grpc.aio.StreamStreamCall[stage_pb2.ForwardMessage, stage_pb2.ForwardAck]


async def _acknowledgements(call: _ForwardCall) -> AsyncIterator[stage_pb2.ForwardAck]:
    while (ack := await call.read()) is not grpc.aio.EOF:
        assert isinstance(ack, stage_pb2.ForwardAck)
        yield ack
    if await call.code() is not grpc.StatusCode.OK:
        raise grpc.aio.AioRpcError(
            await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details()
        )
