"""One Control stream to one stage: messages out in order, messages in as they come, one word when it ends."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import cast

import grpc
import grpc.aio

from fastserve_common.channels import open_channel
from fastserve_scheduler import codec
from fastserve_scheduler.messages import ControlMessage, StageMessage

log = logging.getLogger(__name__)

#: Messages that wait for one stage to take them. Plans in flight are bounded by the number of stages and a stage
#: that broke is left at once, so this many waiting means the stage does not read.
MAX_OUTBOUND_MESSAGES = 1024

#: A frozen process accepts a connection and then says nothing.
CONNECT_TIMEOUT_S = 5.0


class StageLink:
    """Opens at once and lives until the stream ends, for whatever reason; then `on_closed` is called, once.

    `on_connected` is called before, unless it never came to that.
    """

    def __init__(
        self,
        stage: int,
        address: str,
        incarnation: str,
        on_connected: Callable[["StageLink"], None],
        on_message: Callable[["StageLink", StageMessage], None],
        on_closed: Callable[["StageLink", str], None],
    ) -> None:
        self.stage = stage
        self.address = address
        self.incarnation = incarnation
        self.connected = False
        self._on_connected = on_connected
        self._on_message = on_message
        self._on_closed = on_closed
        self._outbound: asyncio.Queue[ControlMessage] = asyncio.Queue()
        self._why = "the scheduler closed the stream"
        self._task = asyncio.create_task(self._run(), name=f"stage-{stage}-control")

    def send(self, message: ControlMessage) -> None:
        """Queue `message`; never waits."""
        if self._outbound.qsize() >= MAX_OUTBOUND_MESSAGES:
            self.close("it does not read its stream")
            return
        self._outbound.put_nowait(message)

    def close(self, why: str) -> None:
        """End the stream; `on_closed` follows with `why`."""
        if not self._task.done():
            self._why = why
            self._task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            async with open_channel(self.address) as channel:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await channel.channel_ready()
                self.connected = True
                self._on_connected(self)
                await self._talk(channel)
        except asyncio.CancelledError:
            pass  # close() said why
        except TimeoutError:
            self._why = f"no connection within {CONNECT_TIMEOUT_S:g} s"
        except grpc.aio.AioRpcError as error:
            self._why = f"{error.code().name.lower()}: {error.details()}"
        except Exception as error:
            log.exception("error on a stage's stream", extra={"stage": self.stage})
            self._why = f"{type(error).__name__}: {error}"
        finally:
            self._on_closed(self, self._why)

    async def _talk(self, channel: grpc.aio.Channel) -> None:
        method = channel.stream_stream(
            codec.STAGE_CONTROL_METHOD,
            request_serializer=codec.control_message_to_wire,
            response_deserializer=codec.stage_message_from_wire,
        )
        call = method()
        writer = asyncio.create_task(self._write(call), name=f"stage-{self.stage}-plans")
        try:
            while (message := await call.read()) is not grpc.aio.EOF:
                self._on_message(self, cast(StageMessage, message))
            status = await call.code()
            self._why = f"it ended the stream ({status.name.lower()}: {await call.details()})"
        finally:
            writer.cancel()
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                await writer

    async def _write(self, call: "grpc.aio.StreamStreamCall[ControlMessage, StageMessage]") -> None:
        try:
            while True:
                await call.write(await self._outbound.get())
        except asyncio.InvalidStateError:
            pass  # the stream has ended; the reader says why
