"""Domain errors, and the one place that turns them into gRPC statuses.

A servicer raises these; `ErrorInterceptor` decides the status. Refusal is not failure: a full queue is
RESOURCE_EXHAUSTED with a retry hint, never INTERNAL.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeAlias, cast

import grpc
import grpc.aio

log = logging.getLogger(__name__)

RETRY_AFTER_METADATA = "retry-after-ms"


class FastServeError(Exception):
    """Base of everything a caller may be told. `message` is a sentence that names what is wrong."""

    code = grpc.StatusCode.INTERNAL

    def __init__(self, message: str, *, retry_after_ms: int = 0) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_ms = retry_after_ms


class InvalidArgumentError(FastServeError):
    """The request itself is wrong. `param` names the field."""

    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, message: str, *, param: str = "") -> None:
        super().__init__(message)
        self.param = param


class NotFoundError(FastServeError):
    code = grpc.StatusCode.NOT_FOUND


class AlreadyExistsError(FastServeError):
    code = grpc.StatusCode.ALREADY_EXISTS


class ResourceExhaustedError(FastServeError):
    """A named limit is reached now; the same request may succeed later."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class UnavailableError(FastServeError):
    """Not ready, draining, or a part is being restarted."""

    code = grpc.StatusCode.UNAVAILABLE


class FailedPreconditionError(FastServeError):
    """The caller's view of the state is out of date, such as an epoch that has been superseded."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class UnauthenticatedError(FastServeError):
    code = grpc.StatusCode.UNAUTHENTICATED


class DeadlineExceededError(FastServeError):
    code = grpc.StatusCode.DEADLINE_EXCEEDED


class AbortedError(FastServeError):
    """Cancelled by the caller or by an explicit abort."""

    code = grpc.StatusCode.CANCELLED


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], error: BaseException) -> NoReturn:
    """End the call with the status that `error` stands for."""
    if isinstance(error, FastServeError):
        trailers: tuple[tuple[str, str], ...] = ()
        if error.retry_after_ms:
            trailers = ((RETRY_AFTER_METADATA, str(error.retry_after_ms)),)
        await context.abort(error.code, error.message, trailers)
    log.error("unexpected error in a call", exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, "internal error")
    raise AssertionError("abort returns never")


Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic in its stubs only


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Gives every handler's exception its status. Cancellation passes through untouched."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "Awaitable[Handler | None]"],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        handler = await continuation(handler_call_details)
        return None if handler is None else _guarded(handler)


def _guarded(handler: Handler) -> Handler:
    coders = (handler.request_deserializer, handler.response_serializer)
    if handler.response_streaming:
        stream = _guard_stream(handler.stream_stream if handler.request_streaming else handler.unary_stream)
        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(stream, *coders)
        return grpc.unary_stream_rpc_method_handler(stream, *coders)
    unary = _guard_unary(handler.stream_unary if handler.request_streaming else handler.unary_unary)
    if handler.request_streaming:
        return grpc.stream_unary_rpc_method_handler(unary, *coders)
    return grpc.unary_unary_rpc_method_handler(unary, *coders)


async def _end_if_nobody_cancelled(context: Context) -> None:
    """A CancelledError that came out of the handler itself: without a status the caller would wait for ever."""
    task = asyncio.current_task()
    if task is not None and not task.cancelling():
        await context.abort(grpc.StatusCode.CANCELLED, "cancelled inside the server")


def _guard_unary(method: object) -> Any:  # noqa: ANN401 - grpc types handlers per arity; this serves two
    call = cast(Callable[[object, Context], Awaitable[object]], method)

    async def guarded(request: object, context: Context) -> object:
        try:
            return await call(request, context)
        except asyncio.CancelledError:
            await _end_if_nobody_cancelled(context)
            raise
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await abort_with(context, error)

    return guarded


def _guard_stream(method: object) -> Any:  # noqa: ANN401 - grpc types handlers per arity; this serves two
    call = cast(Callable[[object, Context], AsyncIterator[object] | Awaitable[None]], method)

    async def guarded(request: object, context: Context) -> AsyncIterator[object]:
        try:
            responses = call(request, context)
            if isinstance(responses, Awaitable):  # a handler that writes to the context itself
                await responses
                return
            async for response in responses:
                yield response
        except asyncio.CancelledError:
            await _end_if_nobody_cancelled(context)
            raise
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await abort_with(context, error)

    return guarded
