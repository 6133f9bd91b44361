"""Carries the core's commands out on real stages and real requests. Synchronous: no command waits for anything.

Owns the core, the ids (`Sessions`) and what is in flight (`Flights`). Called by the driver's task only.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fastserve_common.packed import pack_u32
from fastserve_scheduler.core.commands import (
    Command,
    FinishJob,
    FinishReason,
    FreeHost,
    KeepHost,
    RaiseEpoch,
    RejectJob,
    RejectReason,
    RunIteration,
    SwapDirection,
    SwapOp,
    WakeAt,
)
from fastserve_scheduler.core.config import CoreConfig
from fastserve_scheduler.core.events import (
    ConfigChanged,
    Event,
    HostSlotsGranted,
    HostStoreDown,
    JobAborted,
    StageDown,
    StageUp,
    SwapDone,
    Woke,
)
from fastserve_scheduler.core.scheduler import SchedulerCore
from fastserve_scheduler.flights import Flights, Part
from fastserve_scheduler.journal import JournalWriter
from fastserve_scheduler.messages import (
    Cancel,
    Ready,
    Refusal,
    Report,
    StopReason,
    Submit,
    SwapReport,
    WirePlan,
    WireSwap,
)
from fastserve_scheduler.metrics import Metrics
from fastserve_scheduler.sessions import Link, Sessions
from fastserve_scheduler.swap_watch import SwapWatch
from fastserve_scheduler.timeline import Timeline
from fastserve_scheduler.traces import Traces

log = logging.getLogger(__name__)

_NS_PER_MS, _NS_PER_S = 1_000_000, 1_000_000_000

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


class HostStore(Protocol):
    """One session with the kvstore. Neither call waits; once it is closed they do nothing."""

    @property
    def generation(self) -> int: ...

    @property
    def closed(self) -> bool: ...

    def keep(self, job_id: int, slots: Sequence[int]) -> None: ...

    def free(self, job_id: int, slots: Sequence[int]) -> None: ...


@dataclass(slots=True)
class Runner:
    core: SchedulerCore
    sessions: Sessions
    flights: Flights
    swaps: SwapWatch
    stages: Stages
    clock_ns: Callable[[], int]
    wake_at: Callable[[int], None]
    metrics: Metrics
    journal: JournalWriter | None = None
    timeline: Timeline | None = None
    traces: Traces | None = None
    #: Prove the core's invariants after every event.
    check: bool = False
    #: Epoch of the joined round, as the stages know it; None while there is none.
    wire_epoch: int | None = None
    #: When a stage last said something about a plan in flight, or the first one of several left.
    progress_ns: int = 0
    #: When each plan in flight was sent, by its number on the wire.
    _sent_ns: dict[int, int] = field(default_factory=dict)
    stage_ns: dict[int, int] = field(default_factory=dict)
    #: Whose slots the core has been granted; None: it has none.
    host: HostStore | None = None

    def close(self) -> None:
        """The end: what was recorded is written."""
        if self.journal is not None:
            self.journal.close()
        if self.timeline is not None:
            self.timeline.close()

    # --- stages

    def joined(self, wire_epoch: int, stages: Sequence[Ready]) -> None:
        """All stages wait for plans of `wire_epoch`."""
        if self.host is not None and self.host.closed:
            self.host_lost(self.host)  # these stages swap with something else, before they do
        self.wire_epoch = wire_epoch
        self._sent_ns.clear()
        for ready in stages:
            self._feed(StageUp(ready.stage, ready.num_blocks))

    def broken(self, stage: int, seq: int | None) -> None:
        """`stage` is gone or could not carry out plan `seq` (None: one of those in flight, or none of them)."""
        for job_id in self.flights.broken(seq):
            log.error("a request breaks the stages again and again; it is failed", extra=self._story(job_id))
            self.abort(job_id, StopReason.ERROR)
        self.swaps.clear()
        self.sessions.kv_lost()
        self._feed(StageDown(stage))

    def _story(self, job_id: int) -> dict[str, object]:
        return {**self._whose(job_id), "story": [str(moment) for moment in self.core.story(job_id)]}

    def _whose(self, job_id: int) -> dict[str, object]:
        """For lines about a job: the id that its caller knows."""
        return {"request_id": self.sessions.request_id(job_id), "job_id": job_id}

    def report(self, report: Report) -> None:
        """A stage's account of a plan. Those of other epochs, and those seen before, mean nothing.

        Raises ValueError when it does not fit its plan.
        """
        if report.epoch != self.wire_epoch:
            return
        part = self.flights.answered(report)
        self.progress_ns = self.clock_ns()
        self.stage_ns[report.stage] = report.compute_ns
        if self.timeline is not None:
            self.timeline.computed(
                report.stage,
                report.epoch,
                report.seq,
                begin_ns=report.begin_ns,
                compute_ns=report.compute_ns,
                wait_ns=report.wait_ns,
                heard_ns=self.progress_ns,
            )
        self.swaps.computed(report.stage, report.seq, self.progress_ns)
        if self.traces is not None:
            self.traces.computed(report.stage, report.seq, report.compute_ns, self.progress_ns)
        if part is None:
            return
        sent_ns = self._sent_ns.pop(part.seq)
        stopped = self.sessions.apply(part.items, report)
        if part.items:
            self.metrics.iteration(report.total_compute_ns, self.progress_ns - sent_ns, part.items)
        done = self.flights.landed(part, report.total_compute_ns, stopped)
        if done is None:
            self._dispatch()
        else:
            self._feed(done)

    def silent_stages(self, least_ns: int, swap_ns: int) -> dict[int, str]:
        """Stages that have owed an answer for too long, each with a sentence; idle stages owe none.

        Too long: for a plan above `least_ns`, and above many times its predicted time; for a swap above `swap_ns`.
        """
        if self.wire_epoch is None:
            return {}
        silent = {}
        overdue = self.swaps.overdue(swap_ns, self.clock_ns(), self.flights.computed_before)
        if overdue is not None:
            stage, swap_id, waited_ns = overdue
            silent[stage] = f"no word of swap {swap_id} for {waited_ns / _NS_PER_S:.1f} s"
        unanswered_ns = self._unanswered_ns(least_ns)
        if unanswered_ns is not None:
            silent[self.flights.silent_stage()] = f"no answer to a plan for {unanswered_ns / _NS_PER_S:.1f} s"
        return silent

    def _unanswered_ns(self, least_ns: int) -> int | None:
        """How long the oldest plan has not been answered, when that is too long."""
        oldest = self.flights.oldest()
        if oldest is None:
            return None
        predicted_ns = self.core.predictor.profile.prefill_ns(sum(item.num_tokens for item in oldest.items))
        waited_ns = self.clock_ns() - self.progress_ns
        if waited_ns <= max(least_ns, STALL_FACTOR * predicted_ns):
            return None
        return waited_ns

    # --- host memory

    def host_granted(self, host: HostStore, slots: tuple[int, ...]) -> None:
        """More slots that every stage can swap with."""
        if self.host is not host:
            if self.host is not None:
                self.host_lost(self.host)
            self.host = host
        self._feed(HostSlotsGranted(slots))

    def host_lost(self, host: HostStore) -> None:
        """All slots of `host` are gone; nothing changes when the core has none of them."""
        if self.host is host:
            self.host = None
            self._feed(HostStoreDown())

    def swapped(self, report: SwapReport) -> None:
        """A stage's account of a swap. Those of other epochs, and those seen before, mean nothing."""
        if report.epoch != self.wire_epoch:
            return
        swap = self.swaps.reported(report.swap_id, report.stage, self.clock_ns())
        if swap is None:
            return
        self.metrics.swapped(swap.direction, report.stage, report.copy_ns)
        if self.timeline is not None:
            self.timeline.copied(
                report.stage,
                report.epoch,
                swap.direction,
                report.swap_id,
                begin_ns=report.begin_ns,
                copy_ns=report.copy_ns,
                num_bytes=report.num_bytes,
                heard_ns=self.clock_ns(),
            )
        if report.error:
            self.metrics.swap_failed(report.stage)
            facts = {**self._whose(swap.job_id), "stage": report.stage}
            log.warning("a swap failed, its request is computed again: %s", report.error, extra=facts)
        done = SwapDone(report.swap_id, report.stage, swap.epoch, not report.error, report.num_bytes, report.copy_ns)
        self._feed(done)

    # --- requests

    def submit(self, submit: Submit, link: Link) -> None:
        arrived = self.sessions.open(submit, link)
        if arrived is None:
            return
        if self.traces is not None and submit.traceparent:
            self.traces.opened(arrived.job_id, submit.request_id, submit.traceparent, self.clock_ns())
        log.debug("a request arrives", extra={"request_id": submit.request_id, "job_id": arrived.job_id})
        self._feed(arrived)

    def cancel(self, cancel: Cancel, link: Link) -> None:
        job_id = self.sessions.cancel(cancel, link)
        if job_id is not None:
            self._feed(JobAborted(job_id))

    def abort(self, job_id: int, verdict: StopReason) -> None:
        """End a job for a reason of the scheduler's own."""
        self.sessions.condemn(job_id, verdict)
        self._feed(JobAborted(job_id))

    def reconfigure(self, config: CoreConfig) -> None:
        self._feed(ConfigChanged(config))

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
        if self.traces is not None:
            self.traces.record(now_ns, event, commands)
        for command in commands:
            self._carry_out(command)
        self._dispatch()
        if self.journal is not None:
            self.journal.turn(self.core)  # the stages compute meanwhile

    def _carry_out(self, command: Command) -> None:
        match command:
            case RunIteration():
                self.flights.add(command, 0 if self.host is None else self.host.generation)
            case FinishJob(job_id, reason):
                finished = self.sessions.finish(job_id, _REASONS[reason])
                facts = {"request_id": finished.request_id, "job_id": job_id, "preemptions": finished.preemptions}
                log.debug("a request ends: %s", finished.reason, extra=facts)
                self.flights.forget(job_id)
                self.metrics.finished(finished)
            case RejectJob(job_id, refused, retry_after_ns, limit):
                refusal, text = _REFUSALS[refused]
                self.sessions.reject(job_id, refusal, text.format(limit), -(-retry_after_ns // _NS_PER_MS))
                if self.traces is not None:
                    self.traces.refused(job_id, refusal.value, self.clock_ns())
            case RaiseEpoch():
                if self.wire_epoch is not None:
                    self.wire_epoch = None
                    self.stages.begin_round()
            case WakeAt(at_ns):
                self.wake_at(at_ns)
            case KeepHost() | FreeHost():
                self._tell_host(command)

    def _tell_host(self, command: KeepHost | FreeHost) -> None:
        """The core has acted on it already; without a kvstore there is nobody to tell."""
        match command:
            case KeepHost(job_id, slots) if self.host is not None:
                self.host.keep(job_id, slots)
            case FreeHost(job_id, slots) if self.host is not None:
                self.host.free(job_id, slots)
            case _:
                pass

    def _dispatch(self) -> None:
        if self.wire_epoch is None:
            return
        if len(self.flights) and self.flights.oldest() is None:
            self.progress_ns = self.clock_ns()
        for part in self.flights.departures():
            if self.traces is not None:
                self.traces.sent(part.seq, part.items)
            self._sent_ns[part.seq] = self.clock_ns()
            self.stages.send_plan(self._wire_plan(part, self.wire_epoch))

    def _wire_plan(self, part: Part, wire_epoch: int) -> WirePlan:
        if part.swaps:
            self.swaps.sent(part.seq, part.flight.plan.epoch, part.swaps, self.clock_ns())
            self.sessions.swapped_in([op.job_id for op in part.swaps if op.direction is SwapDirection.IN])
        return WirePlan(
            seq=part.seq,
            epoch=wire_epoch,
            items=self.sessions.wire_items(part.items),
            swaps=tuple([_wire_swap(op) for op in part.swaps]),
            host_generation=part.flight.host_generation if part.swaps else 0,
        )


def _wire_swap(op: SwapOp) -> WireSwap:
    blocks, slots = pack_u32(op.device_blocks), pack_u32(op.host_slots)
    return WireSwap(op.swap_id, op.job_id, op.direction is SwapDirection.OUT, blocks, slots)
