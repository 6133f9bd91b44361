"""Carries the core's commands out on real stages and real requests. Synchronous: no command waits for anything.

Owns the core, the ids (`Sessions`) and what is in flight (`Flights`). Called by the driver's task only.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fastserve_scheduler.core.commands import (
    Command,
    FinishJob,
    FinishReason,
    RaiseEpoch,
    RejectJob,
    RejectReason,
    RunIteration,
    WakeAt,
)
from fastserve_scheduler.core.events import Event, JobAborted, StageDown, StageUp, Woke
from fastserve_scheduler.core.scheduler import SchedulerCore
from fastserve_scheduler.flights import Flights
from fastserve_scheduler.journal import JournalWriter
from fastserve_scheduler.messages import Cancel, Ready, Refusal, Report, StopReason, Submit, WirePlan
from fastserve_scheduler.metrics import Metrics
from fastserve_scheduler.sessions import Link, Sessions

log = logging.getLogger(__name__)

_NS_PER_MS = 1_000_000

#: An iteration may take this many times what the profile predicts before a stage is taken for stalled.
STALL_FACTOR = 20

_REASONS = {
    FinishReason.STOP: StopReason.STOP_TOKEN,
    FinishReason.LENGTH: StopReason.LENGTH,
    FinishReason.ABORTED: StopReason.CANCELLED,
}
_REFUSALS = {
    RejectReason.TOO_LONG: (Refusal.TOO_LONG, "prompt and max_tokens together exceed the limit of {} tokens"),
    RejectReason.QUEUE_FULL_JOBS: (Refusal.QUEUE_FULL_REQUESTS, "{} requests are waiting already"),
    RejectReason.QUEUE_FULL_TOKENS: (Refusal.QUEUE_FULL_TOKENS, "prompts of {} tokens may wait, no more fit"),
    RejectReason.NOT_READY: (Refusal.NOT_READY, "the pipeline is not ready"),
}


class Stages(Protocol):
    """What the runner asks of the pipeline."""

    def begin_round(self) -> None: ...

    def send_plan(self, plan: WirePlan) -> None: ...


@dataclass(slots=True)
class Runner:
    core: SchedulerCore
    sessions: Sessions
    flights: Flights
    stages: Stages
    clock_ns: Callable[[], int]
    wake_at: Callable[[int], None]
    metrics: Metrics
    journal: JournalWriter | None = None
    #: Prove the core's invariants after every event.
    check: bool = False
    #: Epoch of the joined round, as the stages know it; None while there is none.
    wire_epoch: int | None = None
    #: When a stage last said something about a plan in flight, or the first one of several left.
    progress_ns: int = 0
    stage_ns: dict[int, int] = field(default_factory=dict)

    # --- stages

    def joined(self, wire_epoch: int, stages: Sequence[Ready]) -> None:
        """All stages wait for plans of `wire_epoch`."""
        self.wire_epoch = wire_epoch
        for ready in stages:
            self._feed(StageUp(ready.stage, ready.num_blocks))

    def broken(self, stage: int, seq: int | None) -> None:
        """`stage` is gone or could not carry out plan `seq` (None: one of those in flight, or none of them)."""
        for job_id in self.flights.broken(seq):
            log.error("a request breaks the stages again and again; it is failed", extra=self._story(job_id))
            self.abort(job_id, StopReason.ERROR)
        self.sessions.kv_lost()
        self._feed(StageDown(stage))

    def _story(self, job_id: int) -> dict[str, object]:
        return {"job_id": job_id, "story": [str(moment) for moment in self.core.story(job_id)]}

    def report(self, report: Report) -> None:
        """A stage's account of a plan. Those of other epochs, and those seen before, mean nothing.

        Raises ValueError when it does not fit its plan.
        """
        if report.epoch != self.wire_epoch:
            return
        part = self.flights.answered(report)
        self.progress_ns = self.clock_ns()
        self.stage_ns[report.stage] = report.compute_ns
        if part is None:
            return
        stopped = self.sessions.apply(part.items, report)
        self.metrics.iteration(report.total_compute_ns, part.items)
        done = self.flights.landed(part, report.total_compute_ns, stopped)
        if done is None:
            self._dispatch()
        else:
            self._feed(done)

    def silence(self, least_ns: int) -> tuple[int, int] | None:
        """The stage that owes an answer and for how long, when that is too long; idle stages owe none.

        Too long: above `least_ns`, and above many times the predicted time of the oldest plan.
        """
        oldest = self.flights.oldest()
        if oldest is None or self.wire_epoch is None:
            return None
        predicted_ns = self.core.predictor.profile.prefill_ns(sum(item.num_tokens for item in oldest.items))
        waited_ns = self.clock_ns() - self.progress_ns
        if waited_ns <= max(least_ns, STALL_FACTOR * predicted_ns):
            return None
        return self.flights.silent_stage(), waited_ns

    # --- requests

    def submit(self, submit: Submit, link: Link) -> None:
        arrived = self.sessions.open(submit, link)
        if arrived is not None:
            self._feed(arrived)

    def cancel(self, cancel: Cancel, link: Link) -> None:
        job_id = self.sessions.cancel(cancel, link)
        if job_id is not None:
            self._feed(JobAborted(job_id))

    def abort(self, job_id: int, verdict: StopReason) -> None:
        """End a job for a reason of the scheduler's own."""
        self.sessions.condemn(job_id, verdict)
        self._feed(JobAborted(job_id))

    def woke(self) -> None:
        self._feed(Woke())

    # --- the core

    def _feed(self, event: Event) -> None:
        now_ns = self.clock_ns()
        commands = self.core.handle(event, now_ns)
        if self.check:
            self.core.check()
        if self.journal is not None:
            self.journal.record(now_ns, event, commands)
        for command in commands:
            self._carry_out(command)
        self._dispatch()

    def _carry_out(self, command: Command) -> None:
        match command:
            case RunIteration():
                self.flights.add(command)
            case FinishJob(job_id, reason):
                finished = self.sessions.finish(job_id, _REASONS[reason])
                self.flights.forget(job_id)
                self.metrics.finished(finished)
            case RejectJob(job_id, refused, retry_after_ns, limit):
                refusal, text = _REFUSALS[refused]
                self.metrics.rejected(refusal)
                self.sessions.reject(job_id, refusal, text.format(limit), -(-retry_after_ns // _NS_PER_MS))
            case RaiseEpoch():
                if self.wire_epoch is not None:
                    self.wire_epoch = None
                    self.stages.begin_round()
            case WakeAt(at_ns):
                self.wake_at(at_ns)

    def _dispatch(self) -> None:
        if self.wire_epoch is None:
            return
        if len(self.flights) and self.flights.oldest() is None:
            self.progress_ns = self.clock_ns()
        for part in self.flights.departures():
            self.stages.send_plan(WirePlan(part.seq, self.wire_epoch, self.sessions.wire_items(part.items)))
