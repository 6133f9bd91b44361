"""Requests that came before there was a pipeline: after a takeover, gateways are back before the stages are."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from fastserve_scheduler.gateway_link import Peer
from fastserve_scheduler.messages import Refusal, Rejected, Submit

NOT_READY_RETRY_MS = 1000


@dataclass(slots=True)
class Hold:
    """In order of arrival, within the limits of the queue they wait for."""

    max_requests: int
    max_tokens: int
    #: Hears of every request that is refused.
    on_refusal: Callable[[Refusal], None] = lambda _: None
    _held: dict[str, tuple[Peer, Submit]] = field(default_factory=dict)
    _tokens: int = 0

    def __len__(self) -> int:
        return len(self._held)

    def add(self, link: Peer, submit: Submit) -> None:
        """Hold the request, or refuse it. One that comes again under its id replaces the one before."""
        self.remove(submit.request_id)
        refusal = None
        if len(self._held) >= self.max_requests:
            refusal = Refusal.QUEUE_FULL_REQUESTS
        elif self._tokens + len(submit.prompt) > self.max_tokens:
            refusal = Refusal.QUEUE_FULL_TOKENS
        if refusal is not None:
            text = "the queue is full while the pipeline starts"
            self.refuse(link, Rejected(submit.request_id, refusal, text, NOT_READY_RETRY_MS))
            return
        self._held[submit.request_id] = (link, submit)
        self._tokens += len(submit.prompt)

    def remove(self, request_id: str) -> bool:
        """False when it is not held."""
        held = self._held.pop(request_id, None)
        if held is not None:
            self._tokens -= len(held[1].prompt)
        return held is not None

    def release(self) -> Iterator[tuple[Peer, Submit]]:
        """Everything whose gateway is still there, first come first; the hold is empty afterwards."""
        held, self._held, self._tokens = self._held, {}, 0
        return iter([(link, submit) for link, submit in held.values() if not link.closed])

    def refuse_all(self, refusal: Refusal, message: str) -> None:
        for link, submit in self.release():
            self.refuse(link, Rejected(submit.request_id, refusal, message, NOT_READY_RETRY_MS))

    def refuse(self, link: Peer, rejected: Rejected) -> None:
        self.on_refusal(rejected.reason)
        link.send(rejected)
