"""One answer of a session: scheduler events in, deltas out. Pure apart from the metrics it is given."""

import time
from collections.abc import Iterable

from fastserve_common.errors import InvalidArgumentError
from fastserve_gateway.engine.events import (
    Delta,
    Ended,
    Finish,
    FinishReason,
    PlacedLogprob,
    StopKind,
    TokenLogprob,
    TokensArrived,
)
from fastserve_gateway.engine.sequence import Sequence
from fastserve_gateway.metrics import Metrics
from fastserve_gateway.request import GenerationRequest
from fastserve_gateway.text.answer import AnswerText


class Answer:
    """Ends exactly once: by a stop token, the length, a stop string, or `close` with another outcome."""

    def __init__(
        self, index: int, request: GenerationRequest, sequence: Sequence, text: AnswerText, metrics: Metrics
    ) -> None:
        self.index = index
        self.sequence = sequence
        self.num_tokens = 0
        self.open = True
        self._request = request
        self._text = text
        self._metrics = metrics
        self._sent_at_s = time.monotonic()
        self._first_token_at_s = 0.0
        self._last_token_at_s: float | None = None

    @property
    def started(self) -> bool:
        return self._last_token_at_s is not None

    def push(self, event: TokensArrived) -> Delta:
        """The delta has `finish` when a stop string ended the answer; tokens behind it are not counted."""
        texts: list[str] = []
        logprobs: list[PlacedLogprob] = []
        stop_string: str | None = None
        used = 0
        for token_id in event.ids:
            entry = event.logprobs[used] if event.logprobs else None
            used += 1
            stop_string = self._push_token(token_id, entry, texts, logprobs)
            if stop_string is not None:
                break
        self._count(used, event.at_s)
        finish = None
        if stop_string is not None:
            finish = Finish(FinishReason.STOP, stop_string=stop_string)
            self.close("stop")
        return Delta(self.index, "".join(texts), event.ids[:used], logprobs, finish)

    def replay(self, ids: Iterable[int]) -> None:
        """Tokens that the caller has: their text has been shown, what was held back of it will be.

        Raises InvalidArgumentError when they hold a whole stop string: that answer is over.
        """
        for token_id in ids:
            if self._push_token(token_id, None, [], []) is not None:
                raise InvalidArgumentError("the delivered tokens end the answer already", param="delivered")

    def _push_token(
        self, token_id: int, entry: TokenLogprob | None, texts: list[str], logprobs: list[PlacedLogprob]
    ) -> str | None:
        self.num_tokens += 1
        if entry is not None:
            logprobs.append(PlacedLogprob(entry, self._text.num_chars))
        may_stop = self.num_tokens > self._request.min_tokens
        if may_stop and token_id in self._request.stop_token_ids and not self._request.include_stop:
            # The scheduler's word that it stopped here follows; the token that stops is no part of the text.
            return None
        step = self._text.push(token_id, may_stop=may_stop)
        texts.append(step.text)
        return step.stop_string

    def end(self, event: Ended) -> Delta:
        """The scheduler is done with it: show what was held back."""
        step = self._text.finish(may_stop=self.num_tokens > self._request.min_tokens)
        finish = _finish(event, step.stop_string)
        self.close("abort" if finish.reason is FinishReason.ABORT else finish.reason.value)
        return Delta(self.index, step.text, finish=finish)

    def close(self, outcome: str) -> None:
        """Record how it ended; the first call counts."""
        if not self.open:
            return
        self.open = False
        if self._last_token_at_s is not None and self.num_tokens > 1:
            self._metrics.token_s.observe((self._last_token_at_s - self._first_token_at_s) / (self.num_tokens - 1))
        prompt = self._request.prompts[self.index // self._request.n]
        self._metrics.finished(
            outcome,
            prompt_tokens=len(prompt.ids),
            tokens=self.num_tokens,
            seconds=time.monotonic() - self._sent_at_s,
        )

    def _count(self, tokens: int, at_s: float) -> None:
        if not tokens:
            return
        self._metrics.generation_tokens.inc(tokens)
        if self._last_token_at_s is None:
            self._first_token_at_s = at_s
            self._metrics.ttft_s.observe(at_s - self._sent_at_s)
        else:
            # Tokens that came together share the gap before them.
            for _ in range(tokens):
                self._metrics.inter_token_s.observe((at_s - self._last_token_at_s) / tokens)
        self._last_token_at_s = at_s


def _finish(event: Ended, stop_string: str | None) -> Finish:
    if stop_string is not None:
        return Finish(FinishReason.STOP, stop_string=stop_string)
    match event.kind:
        case StopKind.STOP_TOKEN:
            return Finish(FinishReason.STOP, stop_token_id=event.stop_token_id)
        case StopKind.LENGTH:
            return Finish(FinishReason.LENGTH)
        case _:
            return Finish(FinishReason.ABORT)
