"""Deltas of a session in the JSON shapes of the two OpenAI APIs, streamed and whole."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fastserve_gateway.engine.events import Delta, Finish, PlacedLogprob, Usage
from fastserve_gateway.request import GenerationRequest
from fastserve_gateway.text.model import TextModel

Json = dict[str, object]


def usage_json(usage: Usage) -> Json:
    total = usage.prompt_tokens + usage.completion_tokens
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": total,
    }


@dataclass(slots=True)
class Collected:
    """One answer, whole."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[PlacedLogprob] = field(default_factory=list)
    finish: Finish | None = None

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.logprobs.extend(delta.logprobs)
        self.finish = delta.finish or self.finish


class Shape(Protocol):
    """One of the APIs."""

    def head(self, *, chunk: bool) -> Json:
        """The fields outside `choices`."""

    def whole(self, index: int, answer: Collected) -> Json:
        """A choice of the response."""

    def pieces(self, delta: Delta) -> list[Json]:
        """Choices of the events that this delta makes; none when there is nothing to show."""


class _Base:
    def __init__(self, request: GenerationRequest, text: TextModel) -> None:
        self._request = request
        self._text = text
        self._created = int(time.time())
        self._seen: set[int] = set()

    def _first(self, index: int) -> bool:
        if index in self._seen:
            return False
        self._seen.add(index)
        return True

    def _ending(self, finish: Finish | None) -> Json:
        if finish is None:
            return {"finish_reason": None, "stop_reason": None}
        stop: int | str | None = finish.stop_string
        if finish.stop_token_id is not None and finish.stop_token_id not in self._text.eos_token_ids:
            stop = finish.stop_token_id
        return {"finish_reason": finish.reason.value, "stop_reason": stop}

    def _token(self, token_id: int) -> tuple[str, list[int]]:
        raw = self._text.token_bytes(token_id)
        return raw.decode("utf-8", "replace"), list(raw)


class CompletionShape(_Base):
    """/v1/completions. `echoes`: per prompt, the text to put before each of its answers."""

    def __init__(self, request: GenerationRequest, text: TextModel, echoes: Sequence[str]) -> None:
        super().__init__(request, text)
        self._echoes = echoes

    def head(self, *, chunk: bool) -> Json:
        return {
            "id": f"cmpl-{self._request.request_id}",
            "object": "text_completion",
            "created": self._created,
            "model": self._request.model,
        }

    def whole(self, index: int, answer: Collected) -> Json:
        logprobs = self._logprobs(answer.logprobs) if self._request.sampling.logprobs is not None else None
        text = self._echo(index) + "".join(answer.texts)
        return {"index": index, "text": text, "logprobs": logprobs, **self._ending(answer.finish)}

    def pieces(self, delta: Delta) -> list[Json]:
        text = self._echo(delta.index) + delta.text if self._first(delta.index) else delta.text
        if not (text or delta.logprobs or delta.finish):
            return []
        logprobs = self._logprobs(delta.logprobs) if delta.logprobs else None
        return [{"index": delta.index, "text": text, "logprobs": logprobs, **self._ending(delta.finish)}]

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._request.n] if self._echoes else ""

    def _logprobs(self, entries: Sequence[PlacedLogprob]) -> Json:
        want_top = bool(self._request.sampling.logprobs)
        top = [{self._name(i): lp for i, lp in placed.entry.top} for placed in entries]
        return {
            "text_offset": [placed.text_offset for placed in entries],
            "token_logprobs": [placed.entry.logprob for placed in entries],
            "tokens": [self._name(placed.entry.token_id) for placed in entries],
            "top_logprobs": top if want_top else None,
        }

    def _name(self, token_id: int) -> str:
        """Two tokens never share one: they are the keys of `top_logprobs`. As the OpenAI API spells broken text."""
        raw = self._text.token_bytes(token_id)
        if not raw:
            return f"token_id:{token_id}"
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class ChatShape(_Base):
    """/v1/chat/completions."""

    def head(self, *, chunk: bool) -> Json:
        return {
            "id": f"chatcmpl-{self._request.request_id}",
            "object": "chat.completion.chunk" if chunk else "chat.completion",
            "created": self._created,
            "model": self._request.model,
        }

    def whole(self, index: int, answer: Collected) -> Json:
        message = {"role": "assistant", "content": "".join(answer.texts), "refusal": None}
        logprobs = self._logprobs(answer.logprobs) if self._request.sampling.logprobs is not None else None
        return {"index": index, "message": message, "logprobs": logprobs, **self._ending(answer.finish)}

    def pieces(self, delta: Delta) -> list[Json]:
        pieces: list[Json] = []
        if self._first(delta.index):
            pieces.append(self._piece(delta.index, {"role": "assistant", "content": ""}, None, None))
        if delta.text or delta.logprobs or delta.finish:
            content: Json = {"content": delta.text} if delta.text else {}
            logprobs = self._logprobs(delta.logprobs) if delta.logprobs else None
            pieces.append(self._piece(delta.index, content, logprobs, delta.finish))
        return pieces

    def _piece(self, index: int, content: Json, logprobs: Json | None, finish: Finish | None) -> Json:
        return {"index": index, "delta": content, "logprobs": logprobs, **self._ending(finish)}

    def _logprobs(self, entries: Sequence[PlacedLogprob]) -> Json:
        return {"content": [self._entry(placed) for placed in entries], "refusal": None}

    def _entry(self, placed: PlacedLogprob) -> Json:
        limit = self._request.sampling.logprobs or 0
        entry = placed.entry
        top = [self._one(token_id, logprob) for token_id, logprob in entry.top[:limit]]
        return {**self._one(entry.token_id, entry.logprob), "top_logprobs": top}

    def _one(self, token_id: int, logprob: float) -> Json:
        token, raw = self._token(token_id)
        return {"token": token, "logprob": logprob, "bytes": raw}
