"""What happens to every gRPC call before its method: the API key, and bytes that are no message."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from fastserve_common.errors import FastServeError, InvalidArgumentError, UnauthenticatedError
from fastserve_common.tracing import TRACEPARENT, incoming
from fastserve_gateway.keys import KeyCheck
from fastserve_gateway.shared import caller

Context = grpc.aio.ServicerContext[Any, Any]
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]

#: Probes have no key.
OPEN_METHODS = "/grpc.health.v1.Health/"
OURS = "/fastserve.v1.Inference/"


class EdgeInterceptor(grpc.aio.ServerInterceptor):
    """Keys come as metadata `authorization: Bearer KEY`; everything but health checks needs one."""

    def __init__(self, keys: KeyCheck) -> None:
        self._keys = keys

    async def intercept_service(self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails) -> Any:  # noqa: ANN401 - grpc's own signature
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = str(handler_call_details.method)
        if not method.startswith(OPEN_METHODS):
            metadata = dict(handler_call_details.invocation_metadata or ())
            incoming.set(str(metadata.get(TRACEPARENT, "")))
            value = metadata.get("authorization")
            try:
                caller.set(self._keys.check(value if isinstance(value, str) else None))
            except UnauthenticatedError as error:
                return _refusing(handler, error)
        return _decoding(handler) if method.startswith(OURS) else handler


async def _abort(context: Context, error: FastServeError) -> None:
    await context.abort(error.code, error.message)


def _refusing(handler: Any, error: FastServeError) -> Any:  # noqa: ANN401 - a handler of any arity
    """A handler of the same arity that only says no."""

    async def refuse(request: object, context: Context) -> None:
        await _abort(context, error)

    if handler.request_streaming and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(refuse)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(refuse)
    return grpc.unary_unary_rpc_method_handler(refuse)


def _decoding(handler: Any) -> Any:  # noqa: ANN401 - a handler of either arity
    """The same handler, for which bytes that are no message are the caller's error, not an unknown one of ours."""
    error = InvalidArgumentError("the bytes are not a message of this method")

    def decode(data: bytes) -> object:
        try:
            return handler.request_deserializer(data)
        except DecodeError:
            return None

    async def unary(request: object, context: Context) -> object:
        if request is None:
            await _abort(context, error)
        return await handler.unary_unary(request, context)

    async def stream(request: object, context: Context) -> AsyncIterator[object]:
        if request is None:
            await _abort(context, error)
        async for response in handler.unary_stream(request, context):
            yield response

    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(stream, decode, handler.response_serializer)
    return grpc.unary_unary_rpc_method_handler(unary, decode, handler.response_serializer)
