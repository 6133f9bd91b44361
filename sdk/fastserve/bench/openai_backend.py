"""Any OpenAI-compatible server as a backend."""

import json
import time

from fastserve._http import HttpClient, HttpError, Response, SseLines
from fastserve.bench.backends import BackendError, Decoding, Reply, Target
from fastserve.bench.workload import DEFAULT_VOCAB_SIZE, Request, as_text

Json = dict[str, object]

#: How much of a server's error text is kept.
MAX_ERROR_CHARS = 300


class OpenAiBackend:
    """Any server with /v1/completions or /v1/chat/completions, streaming."""

    name = "openai"

    def __init__(
        self, http: HttpClient, decoding: Decoding, *, model: str | None = None, endpoint: str = "/v1/completions"
    ) -> None:
        self._http = http
        self._decoding = decoding
        self._model = model
        self._endpoint = endpoint
        self._chat = "chat" in endpoint
        if self._chat:
            self.name = "openai-chat"

    async def describe(self) -> Target:
        models = await self._json(self._http.payload("GET", "/v1/models"))
        listed = models.get("data")
        first = listed[0] if isinstance(listed, list) and listed else {}
        served = str(first.get("id", "")) if isinstance(first, dict) else ""
        root = str(first.get("root") or served) if isinstance(first, dict) else ""
        self._model = self._model or served
        if not self._model:
            raise BackendError("the server lists no model; name it with --model")
        return Target(self._model, root or self._model, DEFAULT_VOCAB_SIZE)

    async def count_tokens(self, text: str) -> int:
        body = json.dumps({"model": self._model, "prompt": text, "add_special_tokens": False}).encode()
        answer = await self._json(self._http.payload("POST", "/tokenize", body))
        tokens = answer.get("tokens")
        if not isinstance(tokens, list):
            raise BackendError("the answer of /tokenize has no 'tokens'")
        return len(tokens)

    def prepare(self, request: Request) -> object:
        return self._http.payload("POST", self._endpoint, json.dumps(self._body(request)).encode())

    async def generate(self, prepared: object, reply: Reply) -> None:
        assert isinstance(prepared, bytes)
        events = _Events(reply)
        try:
            response = await self._http.send(prepared, SseLines(events.on_data).feed)
        except HttpError as error:
            raise BackendError(str(error)) from error
        if not response.ok:
            raise BackendError(_refusal(response))
        events.check()

    async def close(self) -> None:
        await self._http.close()

    def _body(self, request: Request) -> Json:
        options = self._decoding
        body: Json = {"model": self._model, "stream": True, "stream_options": {"include_usage": True}}
        if self._chat:
            body["messages"] = [{"role": "user", "content": as_text(request).prompt}]
            body["max_completion_tokens"] = request.output_tokens
        else:
            body["prompt"] = request.prompt
            body["max_tokens"] = request.output_tokens
        body["temperature"] = options.temperature
        optional = {"top_p": options.top_p, "top_k": options.top_k, "seed": options.seed}
        body.update({key: value for key, value in optional.items() if value is not None})
        if options.ignore_eos:
            body["ignore_eos"] = True
        return {**body, **options.extra}

    async def _json(self, payload: bytes) -> Json:
        try:
            response = await self._http.send(payload)
            if not response.ok:
                raise BackendError(_refusal(response))
            answer = json.loads(bytes(response.body))
        except (HttpError, ValueError) as error:
            raise BackendError(str(error)) from error
        if not isinstance(answer, dict):
            raise BackendError("the server's answer is not a JSON object")
        return answer


class _Events:
    """The events of one answer. A piece with text or with its answer still going on is an arrival; usage closes."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._done = False
        self._error = ""

    def on_data(self, data: bytes) -> None:
        now_s = time.perf_counter()
        if data == b"[DONE]":
            self._done = True
            return
        try:
            event = json.loads(data)
            if "error" in event:
                self._error = self._error or f"the server failed in mid-stream: {_error_text(event)}"
                return
            if event.get("choices"):
                self._on_choice(event["choices"][0], now_s)
            if event.get("usage"):
                self._reply.input_tokens = event["usage"].get("prompt_tokens", 0)
                self._reply.output_tokens = event["usage"].get("completion_tokens", 0)
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            self._error = self._error or f"an event that is not a completion: {error}"

    def _on_choice(self, choice: Json, now_s: float) -> None:
        delta = choice.get("delta")
        if isinstance(delta, dict):
            text = delta.get("content") or delta.get("reasoning_content") or ""
            counts = bool(text)  # the first event of a chat only names the role
        else:
            text = choice.get("text") or ""
            counts = bool(text) or choice.get("finish_reason") is None
        if counts:
            self._reply.piece(now_s, 1, str(text))
        else:
            self._reply.end_s = now_s

    def check(self) -> None:
        """Raises BackendError unless the answer is complete."""
        if self._error:
            raise BackendError(self._error)
        if not self._done:
            raise BackendError("the stream ended before [DONE]")


def _refusal(response: Response) -> str:
    try:
        text = _error_text(json.loads(bytes(response.body)))
    except ValueError:
        text = bytes(response.body).decode("utf-8", "replace")
    return f"HTTP {response.status}: {text}"[:MAX_ERROR_CHARS]


def _error_text(answer: object) -> str:
    """Of an OpenAI error object, or whatever came instead."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:MAX_ERROR_CHARS]
