"""What happens to every HTTP request before its route: request id, counting, API key, body size.

Plain ASGI: a wrapper that replaced `receive` or ran the route in another task would hide the client's disconnect.
"""

import asyncio
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastserve_common.errors import FastServeError, UnauthenticatedError
from fastserve_common.logs import request_id
from fastserve_common.tracing import TRACEPARENT, incoming
from fastserve_gateway.http.errors import (
    HttpStatusError,
    PayloadTooLargeError,
    error_bytes,
    error_headers,
    status_of,
)
from fastserve_gateway.http.page_files import PAGE_PATHS
from fastserve_gateway.keys import KeyCheck
from fastserve_gateway.limits import BODY_TIMEOUT_S, MAX_REQUEST_ID_CHARS
from fastserve_gateway.metrics import Metrics
from fastserve_gateway.shared import caller

REQUEST_ID_HEADER = "x-request-id"

#: Served to callers without a key: probes and scrapers have none, nor has a browser before it was asked.
OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/metrics", *PAGE_PATHS})

#: In the scope's state: the caller's X-Request-Id, as it came.
REQUEST_ID = "request_id"


async def send_error(send: Send, error: FastServeError) -> None:
    body = error_bytes(error)
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error_headers(error)}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status_of(error), "headers": raw})
    await send({"type": "http.response.body", "body": body})


class Observe:
    """Echoes X-Request-Id, or makes one up, and counts responses by route and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: Sequence[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get(REQUEST_ID_HEADER)
        scope.setdefault("state", {})[REQUEST_ID] = given
        incoming.set(Headers(scope=scope).get(TRACEPARENT, ""))
        shown = given if given and len(given) <= MAX_REQUEST_ID_CHARS and given.isascii() else uuid.uuid4().hex
        request_id.set(shown if given == shown else "")
        path = scope["path"] if scope["path"] in self._paths else "other"

        async def observed(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).setdefault(REQUEST_ID_HEADER, shown)
                self._metrics.http(path, message["status"])
            await send(message)

        await self._app(scope, receive, observed)


class RequireKey:
    def __init__(self, app: ASGIApp, keys: KeyCheck) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in OPEN_PATHS:
            try:
                caller.set(self._keys.check(Headers(scope=scope).get("authorization")))
            except UnauthenticatedError as error:
                await send_error(send, error)
                return
        await self._app(scope, receive, send)


class LimitBody:
    """Reads the whole body before the route runs: bounded in size and in time."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                body = await self._read(scope, receive)
        except TimeoutError:
            await send_error(send, HttpStatusError(408, f"no body within {BODY_TIMEOUT_S:g} s", "request_timeout"))
            return
        except PayloadTooLargeError as error:
            await send_error(send, error)
            return
        if body is None:
            return  # the client left
        pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return pending.pop() if pending else await receive()

        await self._app(scope, replay, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdigit() and (len(declared) > 18 or int(declared) > self._max_bytes):
            raise self._too_large()
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > self._max_bytes:
                raise self._too_large()
            if not message.get("more_body", False):
                return bytes(body)

    def _too_large(self) -> PayloadTooLargeError:
        return PayloadTooLargeError(f"the body has more than {self._max_bytes} bytes (max_body_bytes)")
