"""The gRPC face of the scheduler: `Connect` for gateways, `GetState` for people."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import grpc
import grpc.aio

from fastserve_common.errors import InvalidArgumentError, UnavailableError
from fastserve_scheduler import codec
from fastserve_scheduler.gateway_link import GatewayLink
from fastserve_scheduler.inbox import Inbox
from fastserve_scheduler.inputs import FromGateway, Input, LinkClosed, LinkOpened
from fastserve_scheduler.messages import GatewayHello, GatewayMessage, SchedulerMessage

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class SchedulerService:
    """Refuses everybody with UNAVAILABLE until `lead` is called: a standby has nothing to say."""

    def __init__(self) -> None:
        self._inbox: Inbox[Input] | None = None
        self._state: Callable[[], codec.FleetState] | None = None

    def lead(self, inbox: Inbox[Input], state: Callable[[], codec.FleetState]) -> None:
        self._inbox, self._state = inbox, state

    def add_to(self, server: grpc.aio.Server) -> None:
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Connect": grpc.stream_stream_rpc_method_handler(
                self.connect,
                request_deserializer=codec.gateway_message_from_wire,
                response_serializer=codec.scheduler_message_to_wire,
            ),
            "GetState": grpc.unary_unary_rpc_method_handler(
                self.get_state, request_deserializer=bytes, response_serializer=codec.state_to_wire
            ),
        }
        generic = grpc.method_handlers_generic_handler(codec.SCHEDULER_SERVICE, handlers)
        server.add_generic_rpc_handlers((generic,))

    async def get_state(self, request: bytes, context: Context) -> codec.FleetState:
        if self._state is None:
            raise UnavailableError("this scheduler stands by")
        return self._state()

    async def connect(
        self, requests: AsyncIterator[GatewayMessage], context: Context
    ) -> AsyncIterator[SchedulerMessage]:
        inbox = self._inbox
        if inbox is None:
            raise UnavailableError("this scheduler stands by")
        hello = await anext(requests, None)
        if not isinstance(hello, GatewayHello) or not hello.gateway_id:
            raise InvalidArgumentError("the first message of a stream must be a GatewayHello with a gateway_id")
        link = GatewayLink(hello.gateway_id, batches=hello.accepts_batches)
        # However the call ends, it ends here: a generator that is dropped may be finalised late.
        context.add_done_callback(
            cast(Any, lambda _: inbox.put_now(LinkClosed(link)))
        )  # the stubs' type has no methods
        inbox.put_now(LinkOpened(link))
        reader = asyncio.create_task(self._read(inbox, link, requests), name=f"gateway-{hello.gateway_id}")
        try:
            while (message := await link.next()) is not None:
                yield message
        finally:
            reader.cancel()

    async def _read(self, inbox: Inbox[Input], link: GatewayLink, requests: AsyncIterator[GatewayMessage]) -> None:
        try:
            async for message in requests:
                await inbox.put(FromGateway(link, message))
        except grpc.aio.UsageError:
            pass  # the call ended while this was reading
        finally:
            link.close()
