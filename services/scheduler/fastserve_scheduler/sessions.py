"""Live requests: their ids, where their tokens go, and when they are complete.

The core counts tokens; this is the only place that has them. Pure: no clock, no I/O.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol

from fastserve_common.packed import pack_u32
from fastserve_scheduler.core.commands import PlanItem
from fastserve_scheduler.core.events import JobArrived
from fastserve_scheduler.messages import (
    Cancel,
    CancelReason,
    Finished,
    Ids,
    Refusal,
    Rejected,
    Report,
    SchedulerMessage,
    StopReason,
    Submit,
    Tokens,
    WireItem,
)

_NO_HISTORY = (b"", b"")


class Link(Protocol):
    """Where a request's messages go. `send` never waits; on a closed link it does nothing."""

    @property
    def gateway_id(self) -> str: ...

    @property
    def closed(self) -> bool: ...

    def send(self, message: SchedulerMessage) -> None: ...


class _Nobody:
    """Whom a handed-over job speaks to."""

    gateway_id = ""
    closed = True

    def send(self, message: SchedulerMessage) -> None:
        """Its new place says it."""


@dataclass(slots=True, eq=False)
class Session:
    job_id: int
    submit: Submit
    link: Link
    #: Prompt and output in one array: KV position p holds ids[p].
    ids: Ids
    #: Stop and EOS ids, packed once: kept away from the draw while the output is below min_tokens.
    suppressed: bytes
    #: Why it ends, when the scheduler or the gateway said so before the core did.
    verdict: StopReason | None = None
    stop_token_id: int = 0
    #: First position whose KV is not on the stages. An item that starts below it computes again: a preemption.
    computed: int = 0
    preemptions: int = 0
    #: The block table of its last item, and the same packed: it grows once in many tokens only.
    table: tuple[int, ...] = ()
    packed_table: bytes = b""
    #: Encoded, of every token drawn here, if asked for: a gateway that comes back gets them again with the ids.
    logprobs: list[bytes] = field(default_factory=list)

    @property
    def prompt_tokens(self) -> int:
        return len(self.submit.prompt)

    @property
    def output_tokens(self) -> int:
        return len(self.ids) - len(self.submit.prompt)

    def finished(self, reason: StopReason) -> Finished:
        stop_id = self.stop_token_id if reason is StopReason.STOP_TOKEN else 0
        return Finished(self.submit.request_id, reason, stop_id, self.output_tokens, self.preemptions)

    def take(self, token_id: int, logprobs: tuple[bytes, ...]) -> Tokens:
        """The next token of the output, and how its gateway is told. `logprobs`: its entry, or none."""
        position = self.output_tokens
        self.ids.append(token_id)
        packed = token_id.to_bytes(4, "little")
        if not self.submit.sampling.logprobs:
            return Tokens(self.submit.request_id, position, packed)
        self.logprobs.extend(logprobs)
        return Tokens(self.submit.request_id, position, packed, logprobs)

    def missing(self, delivered: int) -> Tokens | None:
        """What a gateway that has `delivered` tokens has not got yet."""
        ids = self.ids[self.prompt_tokens + delivered :]
        if not ids:
            return None
        logprobs = tuple(self.logprobs[-len(ids) :]) if self.submit.sampling.logprobs else ()
        return Tokens(self.submit.request_id, delivered, pack_u32(ids), logprobs)

    def ended_by(self, token_id: int, position: int) -> bool:
        """Whether `token_id` at output `position` ends the answer."""
        return position >= self.submit.min_tokens and token_id in self.submit.stop_ids


@dataclass(slots=True)
class Sessions:
    """By request id for gateways, by job id for the core. Job ids rise and never repeat."""

    #: Ids at or above it are no tokens; 0: not known yet, nothing is checked.
    vocab_size: int = 0
    #: Hears of every request that is refused.
    on_refusal: Callable[[Refusal], None] = lambda _: None
    _by_request: dict[str, Session] = field(default_factory=dict)
    _by_job: dict[int, Session] = field(default_factory=dict)
    #: Requests there ever were.
    num_opened: int = 0
    _last_job_id: int = 0
    _step: int = 1

    def __len__(self) -> int:
        return len(self._by_request)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_request

    @property
    def job_ids(self) -> tuple[int, ...]:
        return tuple(self._by_job)

    def number(self, first: int, step: int) -> None:
        """Job ids are `first` and every `step`th after it, so that those of several replicas differ."""
        self._last_job_id, self._step = first, step

    def hand_over(self, job_id: int) -> tuple[Link, Submit] | None:
        """What somebody else needs to go on with the job; nothing more is said of it here. None: it is ending."""
        session = self._by_job[job_id]
        if session.verdict is not None:
            return None
        link, session.link = session.link, _Nobody()
        delivered = session.ids[session.prompt_tokens :]
        return link, replace(session.submit, delivered=delivered)

    def live(self) -> Iterable[Session]:
        """The oldest first."""
        return self._by_job.values()

    def of_request(self, request_id: str) -> Session | None:
        return self._by_request.get(request_id)

    def request_id(self, job_id: int) -> str:
        """As its caller knows it; "" for one that is over."""
        session = self._by_job.get(job_id)
        return "" if session is None else session.submit.request_id

    def open(self, submit: Submit, link: Link) -> JobArrived | None:
        """Take a request in. The event for the core; None when there is nothing to run (answered here).

        A live request id that comes from another stream of its gateway, or whose stream is broken, is taken over by
        `link`: what the gateway has not got yet is sent again.
        """
        live = self._by_request.get(submit.request_id)
        if live is not None:
            self._attach(live, submit, link)
            return None
        if (fault := self._fault_of(submit)) is not None:
            self._refuse(link, Rejected(submit.request_id, Refusal.INVALID, fault))
            return None
        session = self._create(submit, link)
        if (reason := _already_complete(session)) is not None:
            link.send(session.finished(reason))
            return None
        self._by_request[submit.request_id] = session
        self._by_job[session.job_id] = session
        return JobArrived(
            job_id=session.job_id,
            prompt_tokens=len(submit.prompt),
            max_output_tokens=submit.max_tokens,
            output_tokens=len(submit.delivered),
            priority=submit.priority,
            service_class=submit.service_class,
            oracle_output_tokens=submit.oracle_tokens,
            expected_output_tokens=submit.expected_output_tokens,
            program=submit.program,
        )

    def _create(self, submit: Submit, link: Link) -> Session:
        self.num_opened += 1
        self._last_job_id += self._step
        suppressed = pack_u32(sorted(submit.stop_ids)) if submit.min_tokens else b""
        return Session(self._last_job_id, submit, link, submit.prompt + submit.delivered, suppressed)

    def _fault_of(self, submit: Submit) -> str | None:
        """What is wrong with the request itself, in words."""
        if not submit.request_id:
            return "a request needs an id"
        if not submit.prompt:
            return "the prompt has no tokens"
        if submit.max_tokens < 1:
            return "max_tokens must be at least 1"
        if submit.min_tokens > submit.max_tokens:
            return f"min_tokens ({submit.min_tokens}) is above max_tokens ({submit.max_tokens})"
        largest = max(max(submit.prompt), max(submit.delivered, default=0))
        if self.vocab_size and largest >= self.vocab_size:
            return f"token id {largest} is outside the vocabulary of {self.vocab_size}"
        return None

    def _attach(self, live: Session, submit: Submit, link: Link) -> None:
        delivered = len(submit.delivered)
        same_owner = live.link.closed or (live.link is not link and live.link.gateway_id == link.gateway_id)
        # Log-probabilities of what an earlier scheduler drew are not known here.
        first = len(live.submit.delivered) if live.submit.sampling.logprobs else 0
        same_request = live.submit.prompt == submit.prompt and first <= delivered <= live.output_tokens
        if not (same_owner and same_request and live.verdict is None):
            text = f"request id {submit.request_id!r} is in use"
            self._refuse(link, Rejected(submit.request_id, Refusal.DUPLICATE_ID, text))
            return
        live.link = link
        if (missing := live.missing(delivered)) is not None:
            link.send(missing)

    def cancel(self, cancel: Cancel, link: Link) -> int | None:
        """The job to abort; None when the request is not live on `link`."""
        session = self._by_request.get(cancel.request_id)
        if session is None or session.link is not link:
            return None
        session.verdict = StopReason.STOP_STRING if cancel.reason is CancelReason.STOP_STRING else StopReason.CANCELLED
        return session.job_id

    def condemn(self, job_id: int, verdict: StopReason) -> None:
        """`job_id` is about to be aborted by the scheduler itself; this is what its client is told."""
        session = self._by_job.get(job_id)
        if session is not None:
            session.verdict = verdict

    def of_link(self, link: Link) -> list[int]:
        """Jobs whose messages go to `link`."""
        return [session.job_id for session in self._by_job.values() if session.link is link]

    def wire_items(self, items: Iterable[PlanItem]) -> tuple[WireItem, ...]:
        """The items with their ids: everything a stage needs, nothing it must remember."""
        return tuple([self._wire_item(item) for item in items])

    def _wire_item(self, item: PlanItem) -> WireItem:
        session = self._by_job[item.job_id]
        end = item.start + item.num_tokens
        session.preemptions += item.start < session.computed
        session.computed = end
        submit = session.submit
        if item.block_table is not session.table:
            session.table, session.packed_table = item.block_table, pack_u32(item.block_table)
        history = _NO_HISTORY
        if item.sample and submit.sampling.needs_history:
            history = (pack_u32(submit.prompt), pack_u32(session.ids[session.prompt_tokens : end]))
        return WireItem(
            item.job_id,
            item.start,
            item.num_tokens,
            session.packed_table,
            pack_u32(session.ids[item.start : end]),
            item.sample,
            submit.sampling.encoded,
            item.output_position,
            session.suppressed if item.output_position < submit.min_tokens else b"",
            history,
        )

    def apply(self, items: Iterable[PlanItem], report: Report) -> tuple[int, ...]:
        """Give the drawn ids to their requests. Returns the jobs whose id ends them.

        A position that is already there (the core threw the draw away and planned it again) is not taken twice.
        """
        stopped = []
        sampled = [item for item in items if item.sample]
        for index, item in enumerate(sampled):
            session = self._by_job[item.job_id]
            token_id = report.token_ids[index]
            if item.output_position == session.output_tokens and session.verdict is None:
                session.link.send(session.take(token_id, report.logprobs[index : index + 1]))
            if session.ended_by(token_id, item.output_position):
                session.stop_token_id = token_id
                stopped.append(item.job_id)
        return tuple(stopped)

    def swapped_in(self, job_ids: Iterable[int]) -> None:
        """Their KV comes back from the host: each was preempted once."""
        for job_id in job_ids:
            session = self._by_job.get(job_id)
            if session is not None:
                session.preemptions += 1

    def kv_lost(self) -> None:
        """The stages hold nothing any more: computing again is no preemption."""
        for session in self._by_job.values():
            session.computed = 0

    def finish(self, job_id: int, reason: StopReason) -> Finished:
        """The core is done with the job: tell the gateway and forget it. The verdict given before comes first."""
        session = self._forget(job_id)
        finished = session.finished(session.verdict or reason)
        session.link.send(finished)
        return finished

    def reject(self, job_id: int, refusal: Refusal, message: str, retry_after_ms: int) -> None:
        """The core refused the job at the door."""
        session = self._forget(job_id)
        self._refuse(session.link, Rejected(session.submit.request_id, refusal, message, retry_after_ms))

    def _refuse(self, link: Link, rejected: Rejected) -> None:
        self.on_refusal(rejected.reason)
        link.send(rejected)

    def _forget(self, job_id: int) -> Session:
        session = self._by_job.pop(job_id)
        del self._by_request[session.submit.request_id]
        return session


def _already_complete(session: Session) -> StopReason | None:
    """A resubmitted request may have been complete when its scheduler died."""
    delivered = session.submit.delivered
    if delivered and session.ended_by(delivered[-1], len(delivered) - 1):
        session.stop_token_id = delivered[-1]
        return StopReason.STOP_TOKEN
    return StopReason.LENGTH if len(delivered) >= session.submit.max_tokens else None
