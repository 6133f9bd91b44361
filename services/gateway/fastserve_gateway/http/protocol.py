"""uvicorn's HTTP/1.1 connection, with limits on what arrives before the application sees anything,
and on how long a client may leave unread what is sent to it."""

import asyncio
from typing import Any, cast

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from fastserve_common.errors import FastServeError
from fastserve_gateway.http.errors import HttpStatusError, error_bytes
from fastserve_gateway.limits import HEADER_TIMEOUT_S, MAX_HEADER_BYTES, MAX_HEADERS, WRITE_TIMEOUT_S

_REASONS = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large"}

#: In the scope of every request: closes the connection at once, unsent data included.
ABORT_CONNECTION = "fastserve.abort_connection"


class LimitedHttpProtocol(HttpToolsProtocol):
    """Caps number, size and arrival time of headers, and the time of a write. Refusals have the API's error shape."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - uvicorn's own signature
        super().__init__(*args, **kwargs)
        self._header_bytes = 0
        self._refusal: HttpStatusError | None = None
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn does
        super().connection_made(transport)
        self._header_timer = self.loop.call_later(HEADER_TIMEOUT_S, self._headers_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        self._stop_write_timer()
        # uvicorn tells the request that came last; with pipelining that is not the one being answered.
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes = 0
        extended: dict[str, object] = cast(dict[str, object], self.scope)
        extended[ABORT_CONNECTION] = self.transport.abort

    def on_url(self, url: bytes) -> None:
        self._add(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._add(len(name) + len(value))
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._refuse(HttpStatusError(431, f"more than {MAX_HEADERS} headers", "too_many_headers"))

    def on_headers_complete(self) -> None:
        self._stop_header_timer()
        super().on_headers_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(WRITE_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Called for everything the parser refuses, and for our own refusals, raised inside it."""
        error = self._refusal or HttpStatusError(400, msg, "invalid_http")
        self._send_and_close(error.status, error)

    def _add(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > MAX_HEADER_BYTES:
            problem = f"the request line and headers have more than {MAX_HEADER_BYTES} bytes"
            self._refuse(HttpStatusError(431, problem, "headers_too_large"))

    def _refuse(self, error: HttpStatusError) -> None:
        self._refusal = error
        raise error  # the parser stops and reports to data_received

    def _headers_late(self) -> None:
        error = HttpStatusError(408, f"no complete request within {HEADER_TIMEOUT_S:g} s", "request_timeout")
        self._send_and_close(error.status, error)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _send_and_close(self, status: int, error: FastServeError) -> None:
        body = error_bytes(error)
        head = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (status, _REASONS[status], len(body)) + body)
        self.transport.close()
