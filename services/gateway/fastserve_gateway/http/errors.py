"""Every error of the HTTP API in one shape: {"error": {"message", "type", "param", "code"}}."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import BaseModel

from fastserve_common.errors import (
    AbortedError,
    AlreadyExistsError,
    DeadlineExceededError,
    FastServeError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
)
from fastserve_gateway.in_flight import TooManyInFlightError
from fastserve_gateway.quota import QuotaExceededError
from fastserve_gateway.request import ContextLengthError, ModelNotFoundError

#: A client's message is quoted in errors up to this many characters.
MAX_MESSAGE_CHARS = 1000


class ErrorDetail(BaseModel):
    message: str
    type: str
    #: The field that is wrong, where one is.
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    error: ErrorDetail


class PayloadTooLargeError(InvalidArgumentError):
    """The body is larger than the limit."""


class HttpStatusError(FastServeError):
    """A status that only HTTP has: unknown path, wrong method, body that never came."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.error_code = code


@dataclass(frozen=True, slots=True)
class _Kind:
    status: int
    type: str
    code: str


#: First match wins: subclasses before their bases.
_KINDS: tuple[tuple[type[FastServeError], _Kind], ...] = (
    (ContextLengthError, _Kind(400, "invalid_request_error", "context_length_exceeded")),
    (PayloadTooLargeError, _Kind(413, "invalid_request_error", "request_too_large")),
    (InvalidArgumentError, _Kind(400, "invalid_request_error", "invalid_value")),
    (AlreadyExistsError, _Kind(400, "invalid_request_error", "duplicate_request_id")),
    (ModelNotFoundError, _Kind(404, "invalid_request_error", "model_not_found")),
    (NotFoundError, _Kind(404, "invalid_request_error", "not_found")),
    (UnauthenticatedError, _Kind(401, "authentication_error", "invalid_api_key")),
    (QuotaExceededError, _Kind(429, "rate_limit_error", "rate_limit_exceeded")),
    (TooManyInFlightError, _Kind(429, "rate_limit_error", "rate_limit_exceeded")),
    (ResourceExhaustedError, _Kind(429, "rate_limit_error", "overloaded")),
    (AbortedError, _Kind(499, "aborted_error", "aborted")),
    (UnavailableError, _Kind(503, "unavailable_error", "unavailable")),
    (DeadlineExceededError, _Kind(504, "timeout_error", "timeout")),
)
_INTERNAL = _Kind(500, "internal_error", "internal")
_PARAMS: Mapping[type[FastServeError], str] = {ModelNotFoundError: "model", AlreadyExistsError: "request_id"}


def _kind(error: FastServeError) -> _Kind:
    if isinstance(error, HttpStatusError):
        return _Kind(error.status, "invalid_request_error", error.error_code)
    return next((kind for base, kind in _KINDS if isinstance(error, base)), _INTERNAL)


def status_of(error: FastServeError) -> int:
    return _kind(error).status


def error_body(error: FastServeError) -> dict[str, object]:
    """The `error` object, for a response or an event of a stream."""
    kind = _kind(error)
    param = error.param if isinstance(error, InvalidArgumentError) else _PARAMS.get(type(error))
    message = error.message[:MAX_MESSAGE_CHARS].encode("utf-8", "replace").decode()
    return {"error": {"message": message, "type": kind.type, "param": param or None, "code": kind.code}}


def error_headers(error: FastServeError) -> dict[str, str]:
    """Retry-After in whole seconds, where trying again makes sense."""
    headers: dict[str, str] = {}
    if isinstance(error, QuotaExceededError):
        headers.update(error.quota.headers())
    if error.retry_after_ms:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_ms / 1000)))
    if isinstance(error, UnauthenticatedError):
        headers["www-authenticate"] = "Bearer"
    return headers


def error_bytes(error: FastServeError) -> bytes:
    return json.dumps(error_body(error), ensure_ascii=False).encode()
