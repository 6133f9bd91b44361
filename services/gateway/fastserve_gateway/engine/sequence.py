"""One answer as the scheduler knows it: what was asked for, and which ids have arrived."""

import time
from array import array
from collections.abc import Callable, Iterable

from fastserve_common.errors import FastServeError
from fastserve_gateway.engine.events import AnswerEvent, Ended, Failed, Ids, StopKind, Submission, TokensArrived


class Sequence:
    """Owned by a session, known to the link while it is live. Ids arrive in order, without gaps, exactly once."""

    def __init__(
        self, submission: Submission, sink: Callable[[AnswerEvent], None], delivered: Iterable[int] = ()
    ) -> None:
        """`delivered`: ids that the caller got through a gateway that is gone."""
        self.submission = submission
        self.received: Ids = array("I", delivered)
        #: The scheduler may not have noticed yet that the other gateway is gone.
        self.resumes = bool(self.received)
        #: Accepted by some scheduler: a refusal when it is submitted again is waited out, not shown.
        self.accepted = False
        #: Groups that have refused it.
        self.tried: list[str] = []
        self._sink = sink
        self._refused_since_s: float | None = None

    @property
    def wire_id(self) -> str:
        return self.submission.wire_id

    def tokens(self, offset: int, event: TokensArrived) -> bool:
        """False when they are not what comes next: then the sequence has failed."""
        problem = self._problem(offset, event)
        if problem is not None:
            self._sink(Failed(FastServeError(problem), "error"))
            return False
        self.accepted = True
        self._refused_since_s = None
        self.received.extend(event.ids)
        self._sink(event)
        return True

    def _problem(self, offset: int, event: TokensArrived) -> str | None:
        if offset != len(self.received) or offset + len(event.ids) > self.submission.max_tokens:
            return (
                f"the scheduler sent {len(event.ids)} tokens at position {offset}; "
                f"{len(self.received)} of at most {self.submission.max_tokens} had arrived"
            )
        if self.submission.logprobs and not event.logprobs:
            return "the scheduler sent tokens without their log-probabilities"
        return None

    def refused_for_s(self) -> float:
        """Since the first refusal in a row, this one included."""
        if self._refused_since_s is None:
            self._refused_since_s = time.monotonic()
        return time.monotonic() - self._refused_since_s

    def ended(self, event: Ended) -> None:
        self._sink(event)

    def failed(self, event: Failed) -> None:
        self._sink(event)

    def complete(self) -> Ended | None:
        """How it ended, when everything has arrived but the word that it ended was lost with a connection."""
        if not self.received:
            return None
        last = self.received[-1]
        if len(self.received) > self.submission.min_tokens and last in self.submission.stop_token_ids:
            return Ended(StopKind.STOP_TOKEN, last)
        if len(self.received) >= self.submission.max_tokens:
            return Ended(StopKind.LENGTH)
        return None
