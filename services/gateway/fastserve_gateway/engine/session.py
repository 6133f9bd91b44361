"""One request while it lives: its answers, what has arrived for them, and its end. Used by HTTP and gRPC alike.

    async with engine.open(request) as session:
        while not session.done():
            delta = await session.next()

Leaving the block, however it is left, cancels what is unfinished. The session has no task of its own: the link
puts events in, the caller's task takes deltas out.
"""

import asyncio
import logging
from array import array
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

from fastserve_common.errors import AbortedError, DeadlineExceededError, FastServeError, UnavailableError
from fastserve_common.logs import request_id
from fastserve_gateway import codec
from fastserve_gateway.codec import CancelReason
from fastserve_gateway.engine.answer import Answer
from fastserve_gateway.engine.events import (
    AnswerEvent,
    Delta,
    Ended,
    Failed,
    StopKind,
    Submission,
    TokensArrived,
    Usage,
)
from fastserve_gateway.engine.groups import SchedulerGroups
from fastserve_gateway.engine.sequence import Sequence
from fastserve_gateway.engine.span import RequestSpan
from fastserve_gateway.in_flight import Places
from fastserve_gateway.metrics import Metrics
from fastserve_gateway.request import GenerationRequest
from fastserve_gateway.text.answer import AnswerText
from fastserve_gateway.text.model import TextModel
from fastserve_gateway.text.stops import StopScanner

log = logging.getLogger(__name__)

NOT_CONNECTED = "no scheduler is connected"

#: After a request failed, its caller's task gets this long to notice; then it is stuck in a write nobody reads.
STUCK_GRACE_S = 1.0


class SlowReaderError(AbortedError):
    """The caller fell further behind than the buffer allows."""


class Session:
    def __init__(
        self,
        request: GenerationRequest,
        link: SchedulerGroups,
        text: TextModel,
        metrics: Metrics,
        *,
        max_buffered_tokens: int,
        timeout_s: float,
        places: Places,
        on_close: Callable[[], None],
    ) -> None:
        self.request = request
        self.usage = Usage(request.num_prompt_tokens, len(request.delivered))
        self._link = link
        self._text = text
        self._metrics = metrics
        self._max_buffered_tokens = max_buffered_tokens
        self._timeout_s = timeout_s
        self._places = places
        self._on_close = on_close
        self._span = RequestSpan.begin(request)
        self._begun = False
        self._answers: list[Answer] = []
        self._inbox: deque[tuple[Answer, AnswerEvent]] = deque()
        self._buffered_tokens = 0
        self._wake = asyncio.Event()
        self._failure: FastServeError | None = None
        self._timer: asyncio.TimerHandle | None = None
        #: Called when the request has failed and the caller's task does not come back for the news.
        self.on_stuck: Callable[[], None] = lambda: None

    async def __aenter__(self) -> Self:
        request_id.set(self.request.request_id)
        log.debug("a request begins", extra={"answers": self.request.num_answers})
        try:
            await self._places.take()
            if self._failure is not None:
                raise self._failure
            if not self._link.view.connected:  # lost meanwhile: what is submitted now would wait for nobody
                raise UnavailableError(NOT_CONNECTED, retry_after_ms=codec.DEFAULT_RETRY_MS)
            self._begun = True
            for index in range(self.request.num_answers):
                self._answers.append(self._start(index))
        except BaseException:
            self._close()
            raise
        self._metrics.request_n.observe(self.request.n)
        if self._timeout_s:
            error = DeadlineExceededError(f"the request did not finish within {self._timeout_s:g} s")
            self._set_timer(self._timeout_s, lambda: self.fail(error, "timeout"))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        aborted = "" if self._failure is None and not self.num_open else "the caller left"
        self._span.end(self.usage, self._failure.message if self._failure is not None else aborted)
        log.debug("a request ends", extra={"tokens": self.usage.completion_tokens, "problem": str(self._failure or "")})
        self._cancel_open("abort")
        if longest := max((answer.num_tokens for answer in self._answers), default=0):
            self._metrics.request_longest_answer.observe(longest)
        if self._timer is not None:
            self._timer.cancel()
        self._places.give_back()
        self._on_close()

    def _set_timer(self, delay_s: float, action: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(delay_s, action)

    def _start(self, index: int) -> Answer:
        request = self.request
        prompt = request.prompts[index // request.n]
        wanted = request.request_id if request.num_answers == 1 else f"{request.request_id}#{index}"
        submission = Submission(
            wire_id=self._link.free_wire_id(wanted),
            prompt_ids=array("I", prompt.ids),
            sampling=codec.sampling_to_wire(request, index),
            max_tokens=prompt.max_tokens,
            min_tokens=request.min_tokens,
            stop_token_ids=request.stop_token_ids,
            priority=request.priority,
            expected_output_tokens=request.expected_output_tokens,
            program=request.program,
            traceparent=self._span.traceparent,
            logprobs=request.sampling.logprobs is not None,
        )
        scanner = StopScanner(request.stops, include_stop=request.include_stop) if request.stops else None
        text = AnswerText(self._text.detokenizer(prompt.ids), scanner)
        sequence = Sequence(submission, lambda event: self._put(answer, event), request.delivered)
        answer = Answer(index, request, sequence, text, self._metrics)
        answer.replay(request.delivered)
        self._metrics.accepted.inc()
        self._metrics.request_max_tokens.observe(prompt.max_tokens)
        self._link.submit(sequence)
        return answer

    # --- for the API

    def done(self) -> bool:
        """Every answer has ended and every delta has been taken."""
        return not self._inbox and self._failure is None and not any(answer.open for answer in self._answers)

    @property
    def num_open(self) -> int:
        return sum(answer.open for answer in self._answers)

    @property
    def num_running(self) -> int:
        return sum(answer.open and answer.started for answer in self._answers)

    async def next(self, timeout_s: float | None = None) -> Delta | None:
        """The next delta; its text may be empty. None after `timeout_s` without one.

        Raises the error that ended the request: refused by the scheduler, timed out, reader too slow, lost.
        """
        while True:
            if self._failure is not None:
                raise self._failure
            while self._inbox:
                answer, event = self._inbox.popleft()
                delta = self._handle(answer, event)
                if delta is not None:
                    if delta.finish is not None:
                        self._drop_events_of(answer)
                    return delta
                if self._failure is not None:
                    raise self._failure
            self._wake.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._wake.wait()
            except TimeoutError:
                return None

    def fail(self, error: FastServeError, outcome: str) -> None:
        """End the request with an error; the first one counts. What is unfinished is cancelled at once."""
        if self._failure is None and not (self._begun and self.done()):
            self._failure = error
            self._inbox.clear()
            self._cancel_open(outcome)
            self._wake.set()
            self._set_timer(STUCK_GRACE_S, lambda: self.on_stuck())

    def abort(self) -> None:
        """End the request on the caller's word: its open answers finish with reason `abort`, text so far stands."""
        for answer in self._answers:
            if answer.open:
                self._link.cancel(answer.sequence.wire_id, CancelReason.CLIENT)
                self._put(answer, Ended(StopKind.CANCELLED))

    # --- events

    def _put(self, answer: Answer, event: AnswerEvent) -> None:
        if self._failure is not None:
            return
        if isinstance(event, TokensArrived):
            if self._buffered_tokens > self._max_buffered_tokens:
                problem = f"the reader is more than {self._max_buffered_tokens} tokens behind"
                self.fail(SlowReaderError(problem), "abort")
                return
            self._buffered_tokens += len(event.ids)
        self._inbox.append((answer, event))
        self._wake.set()

    def _handle(self, answer: Answer, event: AnswerEvent) -> Delta | None:
        if isinstance(event, TokensArrived):
            self._buffered_tokens -= len(event.ids)
        match event:
            case TokensArrived():
                return self._tokens(answer, event)
            case Ended(StopKind.ERROR):
                self._lose(answer, FastServeError("the engine could not finish this request"), "error")
                return None
            case Ended():
                return answer.end(event)
            case Failed(error, outcome, limit):
                if limit:
                    self._metrics.admission_rejected(limit)
                self._lose(answer, error, outcome)
                return None

    def _tokens(self, answer: Answer, event: TokensArrived) -> Delta:
        self._span.token()
        before = answer.num_tokens
        delta = answer.push(event)
        self.usage.completion_tokens += answer.num_tokens - before
        if delta.finish is not None:
            self._link.cancel(answer.sequence.wire_id, CancelReason.STOP_STRING)
        return delta

    def _drop_events_of(self, answer: Answer) -> None:
        """What came behind its end: tokens after a stop string, an end after an abort. Left there, it would look like
        news to come."""
        dropped = [event for owner, event in self._inbox if owner is answer]
        self._buffered_tokens -= sum(len(event.ids) for event in dropped if isinstance(event, TokensArrived))
        self._inbox = deque(item for item in self._inbox if item[0] is not answer)

    def _lose(self, answer: Answer, error: FastServeError, outcome: str) -> None:
        """One answer failed, so the request does; the others are aborted."""
        answer.close(outcome)
        self._failure = error
        self._inbox.clear()
        self._cancel_open("abort")

    def _cancel_open(self, outcome: str) -> None:
        for answer in self._answers:
            if answer.open:
                self._link.cancel(answer.sequence.wire_id, CancelReason.CLIENT)
                answer.close(outcome)
