"""A small OpenAI-compatible server in a thread. What goes wrong is chosen by the body's `mode` or `model`."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

START_TIMEOUT_S = 20


@dataclass
class FakeOpenAi:
    """`bodies`: of the requests seen. `cut_off`: released when a client left a stream that was not over."""

    url: str = ""
    bodies: list[dict[str, object]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    cut_off: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/v1/models")
        async def models() -> dict[str, object]:
            return {"data": [{"id": "fake", "root": "org/fake"}]}

        @app.post("/tokenize")
        async def tokenize(request: Request) -> dict[str, object]:
            return {"tokens": (await request.json())["prompt"].split()}

        @app.post("/v1/completions")
        async def completions(request: Request) -> Response:
            return await self._answer(request, chat=False)

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> Response:
            return await self._answer(request, chat=True)

        return app

    async def _answer(self, request: Request, *, chat: bool) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        mode = body.get("mode", body["model"])
        if mode == "full" or (mode == "every-other-full" and len(self.bodies) % 2 == 0):
            return JSONResponse({"error": {"message": "the queue is full"}}, status_code=429)
        if mode == "plain-500":
            return Response("oops", status_code=500)
        return StreamingResponse(self._events(body, mode, chat), media_type="text/event-stream")

    async def _events(self, body: dict[str, object], mode: str, chat: bool) -> AsyncIterator[str]:
        try:
            async for data in _stream(body, mode, chat):
                yield f"data: {data}\n\n"
        except asyncio.CancelledError:
            self.cut_off.release()
            raise


async def _stream(body: dict[str, object], mode: str, chat: bool) -> AsyncIterator[str]:
    limit = body.get("max_completion_tokens", body.get("max_tokens"))
    assert isinstance(limit, int)
    if chat:
        yield json.dumps({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    for number in range(limit):
        if mode == "hang" and number == 1:
            await asyncio.Event().wait()
        if mode == "breaks" and number == 1:
            yield json.dumps({"error": {"message": "stage 1 is gone"}})
            return
        if mode == "garbage" and number == 1:
            yield "{"
        if mode == "cut" and number == 1:
            return
        piece = {"delta": {"content": "w "}} if chat else {"text": "w "}
        finish = "length" if number == limit - 1 else None
        yield json.dumps({"choices": [{"index": 0, **piece, "finish_reason": finish}]})
    if mode != "no-usage":
        prompt = body.get("prompt", "")
        usage = {"prompt_tokens": len(prompt) if isinstance(prompt, list) else 7, "completion_tokens": limit}
        yield json.dumps({"choices": [], "usage": usage})
    yield "[DONE]"


@pytest.fixture
def openai() -> Iterator[FakeOpenAi]:
    fake = FakeOpenAi()
    config = uvicorn.Config(fake.app(), port=0, log_level="error", loop="asyncio", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not server.started and thread.is_alive() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert server.started
    fake.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    yield fake
    server.should_exit = True
    thread.join()
