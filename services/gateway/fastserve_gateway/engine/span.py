"""The span of a request, from its first submission to its end. Without tracing: nothing."""

import time
from dataclasses import dataclass, field

from fastserve_common.tracing import Span, incoming, tracing
from fastserve_gateway.engine.events import Usage
from fastserve_gateway.request import GenerationRequest

NAME = "llm_request"


@dataclass(slots=True)
class RequestSpan:
    """Attributes are those of OpenTelemetry's conventions for generative AI, as other servers name them."""

    request: GenerationRequest
    _span: Span | None
    _begin_s: float = field(default_factory=time.monotonic)
    _first_token_s: float | None = None

    @classmethod
    def begin(cls, request: GenerationRequest) -> "RequestSpan":
        """A child of what the caller of the current task sent."""
        on = tracing()
        return cls(request, None if on is None else on.begin(NAME, parent=incoming.get(), server=True))

    @property
    def traceparent(self) -> str:
        return "" if self._span is None else self._span.traceparent

    def token(self) -> None:
        if self._first_token_s is None:
            self._first_token_s = time.monotonic() - self._begin_s

    def end(self, usage: Usage, error: str) -> None:
        """`error`: a sentence; empty: it went well. The first call counts."""
        if self._span is None:
            return
        span, self._span = self._span, None
        request = self.request
        attributes: dict[str, str | int | float] = {
            "gen_ai.request.id": request.request_id,
            "gen_ai.request.model": request.model,
            "gen_ai.request.max_tokens": max(prompt.max_tokens for prompt in request.prompts),
            "gen_ai.request.temperature": request.sampling.temperature,
            "gen_ai.request.top_p": request.sampling.top_p,
            "gen_ai.request.n": request.n,
            "gen_ai.usage.prompt_tokens": usage.prompt_tokens,
            "gen_ai.usage.completion_tokens": usage.completion_tokens,
            "gen_ai.usage.num_sequences": request.num_answers,
            "gen_ai.latency.e2e": time.monotonic() - self._begin_s,
        }
        if self._first_token_s is not None:
            attributes["gen_ai.latency.time_to_first_token"] = self._first_token_s
        span.end(attributes=attributes, error=error)
