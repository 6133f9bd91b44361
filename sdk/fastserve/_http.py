"""HTTP/1.1 for streamed answers: one small protocol over a C parser, bytes handed on as they arrive.

The load generator shares the machine with what it measures, so a streamed piece must cost little, and its time
must be taken when the socket gives it. Keep-alive connections, one request at a time on each; no redirects, no
compression, no proxies.
"""

import asyncio
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, cast
from urllib.parse import urlsplit

import httptools

#: What is kept of an answer that is not streamed to a sink.
MAX_BODY_BYTES = 16 * 1024 * 1024

Sink = Callable[[bytes], None]


class HttpError(Exception):
    """The connection failed, or the server did not speak HTTP."""


@dataclass(slots=True)
class Response:
    """`body` is what did not go to a sink: everything, or of an error status."""

    status: int = 0
    body: bytearray = field(default_factory=bytearray)

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300


class _Connection(asyncio.Protocol):
    """One connection; parser callbacks are the `on_` methods that httptools names."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._done: asyncio.Future[Response] | None = None
        self._response = Response()
        self._sink: Sink | None = None
        self.untouched = True  # nothing of the current answer has arrived
        self.reusable = False
        self._framed = False  # a length or chunks tell where the body ends; else closing does

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's do not inherit from it

    def send(self, payload: bytes, sink: Sink | None) -> asyncio.Future[Response]:
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self._response, self._sink = Response(), sink
        self.untouched, self.reusable, self._framed = True, False, False
        self._transport.write(payload)
        return self._done

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    @property
    def closed(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def data_received(self, data: bytes) -> None:
        if self._parser is None or self._done is None or self._done.done():
            self.close()
            return
        self.untouched = False
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserCallbackError) as error:
            self._fail(error.__context__ or error)

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None and self._response.status and not self._framed:
            self._finish()
        self._fail(exc or HttpError("the server closed the connection before the answer was complete"))

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._framed = True

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self._response.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._sink is not None and self._response.ok:
            self._sink(body)
        elif len(self._response.body) + len(body) > MAX_BODY_BYTES:
            raise HttpError(f"the answer is larger than {MAX_BODY_BYTES} bytes")
        else:
            self._response.body += body

    def on_message_complete(self) -> None:
        assert self._parser is not None
        self.reusable = bool(self._parser.should_keep_alive())
        self._finish()

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(self._response)

    def _fail(self, error: BaseException) -> None:
        if self._done is not None and not self._done.done():
            wrapped = error if isinstance(error, HttpError) else HttpError(f"{type(error).__name__}: {error}")
            self._done.set_exception(wrapped)
        self.close()


class HttpClient:
    """Requests to one server. `base_url`: http(s)://host[:port][/prefix]. Raises ValueError for anything else."""

    def __init__(self, base_url: str, headers: Mapping[str, str] | None = None, *, verify: bool = True) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"base URL {base_url!r}: expected http://host:port or https://host")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._prefix = parts.path.rstrip("/")
        self._ssl = _tls(verify) if parts.scheme == "https" else None
        fixed = {"Host": parts.netloc.rpartition("@")[2], "Accept": "*/*", **(headers or {})}
        self._head = "".join(f"{_header(k)}: {_header(v)}\r\n" for k, v in fixed.items())
        self._idle: list[_Connection] = []

    def payload(self, method: Literal["GET", "POST"], path: str, body: bytes = b"") -> bytes:
        """The bytes of a request, ready to be sent as often as needed."""
        length = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if method == "POST" else ""
        return f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._head}{length}\r\n".encode("latin-1") + body

    async def send(self, payload: bytes, sink: Sink | None = None) -> Response:
        """Raises HttpError. The body of a 2xx answer goes to `sink`, piece by piece, when there is one."""
        while self._idle:
            connection = self._idle.pop()
            if connection.closed:
                continue
            try:
                return await self._exchange(connection, payload, sink)
            except HttpError:
                if not connection.untouched:  # else it was closed while idle: not the request's fault
                    raise
        return await self._exchange(await self._connect(), payload, sink)

    async def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._ssl)
        except OSError as error:
            raise HttpError(f"cannot connect to {self._host}:{self._port}: {error}") from error
        return connection

    async def _exchange(self, connection: _Connection, payload: bytes, sink: Sink | None) -> Response:
        try:
            response = await connection.send(payload, sink)
        except BaseException:
            connection.close()
            raise
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()
        return response


def _tls(verify: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _header(text: str) -> str:
    if not text.isprintable():
        raise ValueError(f"header text {text!r} has control characters")
    return text


class SseLines:
    """Cuts a server-sent event stream into the payloads of its `data:` lines, however the bytes are cut."""

    def __init__(self, on_data: Sink) -> None:
        self._on_data = on_data
        self._rest = b""

    def feed(self, data: bytes) -> None:
        lines = (self._rest + data).split(b"\n") if self._rest else data.split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._on_data(line[5:].strip())
