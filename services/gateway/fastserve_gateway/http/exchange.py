"""One generation over HTTP: whole or as server-sent events; aborted as soon as the client is gone."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from fastserve_common.errors import AbortedError, FastServeError
from fastserve_gateway.engine.engine import Engine
from fastserve_gateway.engine.events import FinishReason
from fastserve_gateway.engine.session import Session
from fastserve_gateway.http.errors import error_body
from fastserve_gateway.http.middleware import REQUEST_ID_HEADER
from fastserve_gateway.http.protocol import ABORT_CONNECTION
from fastserve_gateway.http.shapes import Collected, Json, Shape, usage_json
from fastserve_gateway.request import GenerationRequest

#: A stream without news sends a comment this often, so that proxies keep the connection and a dead one is noticed.
HEARTBEAT_S = 15.0
_HEARTBEAT = b": waiting\n\n"
_DONE = b"data: [DONE]\n\n"


class ClientGoneError(AbortedError):
    """The client closed the connection."""


@contextlib.asynccontextmanager
async def abort_on_disconnect(receive: Receive, session: Session) -> AsyncIterator[None]:
    """While the block runs, a client that leaves ends the session at once, whatever its task is waiting for."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        session.fail(ClientGoneError("the client closed the connection"), "abort")

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def answer_whole(engine: Engine, request: GenerationRequest, shape: Shape, receive: Receive) -> Response:
    """Raises what ended the request, and AbortedError when it was aborted on someone's word."""
    collected = [Collected() for _ in range(request.num_answers)]
    async with engine.open(request) as session, abort_on_disconnect(receive, session):
        while not session.done():
            delta = await session.next()
            if delta is not None:
                collected[delta.index].add(delta)
        usage = usage_json(session.usage)
    if any(answer.finish and answer.finish.reason is FinishReason.ABORT for answer in collected):
        raise AbortedError("the request was aborted")
    choices = [shape.whole(index, answer) for index, answer in enumerate(collected)]
    content = {**shape.head(chunk=False), "choices": choices, "usage": usage}
    return JSONResponse(content, headers=_headers(request))


class StreamedAnswer(Response):
    """Server-sent events. The status is decided by the first event: a refusal is an ordinary error response."""

    media_type = "text/event-stream"

    def __init__(
        self, engine: Engine, request: GenerationRequest, shape: Shape, *, include_usage: bool, continuous_usage: bool
    ) -> None:
        super().__init__(headers={**_headers(request), "cache-control": "no-cache"})
        del self.headers["content-length"]
        self._engine = engine
        self._request = request
        self._shape = shape
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        # Everything before `choices` is the same in every event.
        self._head = json.dumps(shape.head(chunk=True), ensure_ascii=False, separators=(",", ":"))[:-1].encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._engine.open(self._request) as session, abort_on_disconnect(receive, session):
            session.on_stuck = scope.get(ABORT_CONNECTION, session.on_stuck)
            first = await self._events(session)
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await _send(send, first)
            try:
                while not session.done():
                    await _send(send, await self._events(session))
                if self._include_usage:
                    await _send(send, self._event([], usage_json(session.usage)))
            except FastServeError as error:
                await _send(send, b"data: %b\n\n" % json.dumps(error_body(error), ensure_ascii=False).encode())
            await send({"type": "http.response.body", "body": _DONE, "more_body": False})

    async def _events(self, session: Session) -> bytes:
        """The events of the next delta that has any; a comment when none comes for a while."""
        delta = await session.next(HEARTBEAT_S)
        if delta is None:
            return _HEARTBEAT
        usage = usage_json(session.usage) if self._continuous_usage else None
        return b"".join(self._event([choice], usage) for choice in self._shape.pieces(delta))

    def _event(self, choices: list[Json], usage: Json | None) -> bytes:
        body = json.dumps(choices, ensure_ascii=False, separators=(",", ":")).encode()
        tail = b""
        if usage is not None:
            tail = b',"usage":' + json.dumps(usage, separators=(",", ":")).encode()
        elif self._include_usage:
            tail = b',"usage":null'
        return b'data: %b,"choices":%b%b}\n\n' % (self._head, body, tail)


def _headers(request: GenerationRequest) -> dict[str, str]:
    quota = {} if request.quota is None else request.quota.headers()
    return {REQUEST_ID_HEADER: request.request_id, **quota}


async def _send(send: Send, body: bytes) -> None:
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})
