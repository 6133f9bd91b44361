"""What a call can raise. One class per thing a caller can do about it; `message` is the server's sentence.

`from_rpc` is the only place that reads gRPC statuses.
"""

from collections.abc import Iterable
from typing import cast

import grpc

_RETRY_AFTER_METADATA = "retry-after-ms"


class FastServeError(Exception):
    """Base of every error that a client raises. `request_id` is empty for calls that have none."""

    def __init__(self, message: str, *, request_id: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.request_id = request_id


class InvalidRequestError(FastServeError, ValueError):
    """The request itself is wrong, or can never fit. Sending it again will not help."""


class AuthenticationError(FastServeError):
    """The API key is missing or not accepted."""


class NotFoundError(FastServeError):
    """The named model is not the one that is served."""


class AlreadyExistsError(FastServeError):
    """A live request has this id."""


class ResourceExhaustedError(FastServeError):
    """The queue is full now. `retry_after_s`: when to try again, None when the server does not say."""

    def __init__(self, message: str, *, request_id: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message, request_id=request_id)
        self.retry_after_s = retry_after_s


class UnavailableError(FastServeError, ConnectionError):
    """Nobody answers, the cluster is not ready, or it is draining. `retry_after_s` as above."""

    def __init__(self, message: str, *, request_id: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message, request_id=request_id)
        self.retry_after_s = retry_after_s


class DeadlineExceededError(FastServeError, TimeoutError):
    """`timeout` passed. The request was aborted on the server."""


class AbortedError(FastServeError):
    """The request was aborted: by `abort`, by closing its stream, or by closing the client."""


class UnsupportedError(FastServeError):
    """The server does not know this call."""


class InternalError(FastServeError):
    """A fault of the server."""


_BY_CODE: dict[grpc.StatusCode, type[FastServeError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequestError,
    grpc.StatusCode.FAILED_PRECONDITION: InvalidRequestError,
    grpc.StatusCode.UNAUTHENTICATED: AuthenticationError,
    grpc.StatusCode.PERMISSION_DENIED: AuthenticationError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExistsError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.CANCELLED: AbortedError,
    grpc.StatusCode.ABORTED: AbortedError,
    grpc.StatusCode.UNIMPLEMENTED: UnsupportedError,
}


def from_rpc(error: grpc.RpcError, request_id: str = "") -> FastServeError:
    """The typed error for a failed call, sync or async."""
    code = error.code()
    message = error.details() or code.name.replace("_", " ").lower()
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        message = f"the deadline passed before the answer was complete ({message})"
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return ResourceExhaustedError(message, request_id=request_id, retry_after_s=_retry_after_s(error))
    if code is grpc.StatusCode.UNAVAILABLE:
        return UnavailableError(message, request_id=request_id, retry_after_s=_retry_after_s(error))
    return _BY_CODE.get(code, InternalError)(message, request_id=request_id)


def _retry_after_s(error: grpc.RpcError) -> float | None:
    metadata = cast(Iterable[tuple[str, str | bytes]] | None, error.trailing_metadata())
    for key, value in metadata or ():
        if key == _RETRY_AFTER_METADATA and isinstance(value, str) and value.isdecimal():
            return int(value) / 1000
    return None
