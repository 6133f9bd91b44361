"""The live driver of the core: one task owns all scheduling state; everybody else puts messages in its inbox.

Nothing here waits between a message and what it causes: a plan is on its way to stage 0 before the next message is
looked at.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace

from fastserve_scheduler.core.scheduler import SchedulerCore
from fastserve_scheduler.core.snapshot import Snapshot
from fastserve_scheduler.desk import DRAINED_BY_OPERATOR, GOING_AWAY, Desk
from fastserve_scheduler.flights import Flights
from fastserve_scheduler.gateway_link import Peer
from fastserve_scheduler.identity import Identity
from fastserve_scheduler.inbox import Inbox
from fastserve_scheduler.inputs import (
    CheckProgress,
    Drain,
    FromGateway,
    FromStage,
    GraceOver,
    HoldOver,
    HostGranted,
    HostLost,
    Input,
    Joined,
    LinkClosed,
    LinkOpened,
    Lost,
    Ordered,
    PipelineChanged,
    ProfileFailed,
    ProfileKnown,
    WakeUp,
)
from fastserve_scheduler.journal import JournalWriter
from fastserve_scheduler.kv_link import KvLink
from fastserve_scheduler.messages import (
    Cancel,
    Fault,
    Measured,
    Ready,
    Refusal,
    Report,
    StageMessage,
    Status,
    StopReason,
    Submit,
    SwapReport,
)
from fastserve_scheduler.metrics import LossCause, Metrics
from fastserve_scheduler.pipeline import Pipeline
from fastserve_scheduler.profile_search import ProfileSearch
from fastserve_scheduler.profiler import Profiler
from fastserve_scheduler.runner import Runner
from fastserve_scheduler.sessions import Link, Sessions
from fastserve_scheduler.settings import SchedulerSettings
from fastserve_scheduler.swap_watch import SwapWatch
from fastserve_scheduler.timeline import Timeline
from fastserve_scheduler.timers import Timers
from fastserve_scheduler.traces import Traces

log = logging.getLogger(__name__)

PROGRESS_CHECK_S = 0.5
_NS_PER_S = 1_000_000_000


class Driver:
    """`run` it; it ends when cancelled, or with the exception that makes going on impossible (SettingsError)."""

    def __init__(
        self,
        settings: SchedulerSettings,
        inbox: Inbox[Input],
        pipeline: Pipeline,
        kv_link: KvLink,
        profiler: Profiler,
        desk: Desk,
        metrics: Metrics,
        on_status: Callable[[Status], None],
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._settings, self._inbox, self._pipeline, self._kv_link = settings, inbox, pipeline, kv_link
        self._profiler = profiler
        self._desk, self._metrics, self._on_status, self._clock_ns = desk, metrics, on_status, clock_ns
        self.sessions = Sessions(on_refusal=metrics.refused)
        self.runner: Runner | None = None
        self.drained = asyncio.Event()
        self._identity: Identity | None = None
        self._exchanged = False
        self._stages: tuple[Ready, ...] | None = None
        #: What the kvstore has granted before there is a core to use it.
        self._grants: list[HostGranted] = []
        self._search = ProfileSearch(profiler, inbox)
        self._wish = 0
        self._timers = Timers(inbox)

    async def run(self) -> None:
        self._timers.after(PROGRESS_CHECK_S, CheckProgress())
        try:
            while True:
                self._take(await self._inbox.get())
                if self._desk.draining and not len(self.sessions):
                    self.drained.set()
                await asyncio.sleep(0)  # the plan leaves before the next message is looked at
        finally:
            self._close()

    def _close(self) -> None:
        self._timers.cancel_all()
        self._search.cancel()
        if self.runner is not None:
            self.runner.close()

    def _take(self, message: Input) -> None:
        match message:
            case FromStage(stage, said):
                self._from_stage(stage, said)
            case FromGateway(link, Submit() as submit):
                self._submit(link, submit)
            case FromGateway(link, Cancel() as cancel):
                self._cancel(link, cancel)
            case LinkOpened() | LinkClosed() | GraceOver() | FromGateway():
                self._link(message)
            case Joined() | Lost() | PipelineChanged() | ProfileKnown() | ProfileFailed():
                if self._pipeline.joined:  # while it is not, what is on the host waits there
                    self._kv_link.aim(self._pipeline.host_arena)
                self._cluster(message)
                self._refresh_status()
            case HostGranted() | HostLost():
                self._host(message)
            case _:
                self._timer(message)

    # --- gateways

    def _link(self, message: LinkOpened | LinkClosed | GraceOver | FromGateway) -> None:
        match message:
            case LinkOpened(link):
                self._desk.opened(link)
            case LinkClosed(link):
                self._desk.closed(link)
                if self.sessions.of_link(link):
                    self._timers.after(self._settings.reattach_grace, GraceOver(link))
            case GraceOver(link):
                for job_id in self.sessions.of_link(link):
                    self._abort(job_id, StopReason.CANCELLED)
            case FromGateway():
                pass  # a message of a newer gateway, or a second hello

    def _submit(self, link: Peer, submit: Submit) -> None:
        if link.closed:
            return  # it was read before the stream broke; the gateway submits it again when it is back
        if self._desk.draining and submit.request_id not in self.sessions:
            self._desk.refuse_draining(link, submit)
        elif self.runner is None:
            if not len(self._desk.hold):
                self._timers.after(self._settings.startup_hold, HoldOver())
            self._desk.hold.add(link, submit)
        else:
            self.runner.submit(submit, link)

    def _cancel(self, link: Peer, cancel: Cancel) -> None:
        if not self._desk.cancel_held(cancel, link) and self.runner is not None:
            self.runner.cancel(cancel, link)

    def _abort(self, job_id: int, verdict: StopReason) -> None:
        if self.runner is not None:
            self.runner.abort(job_id, verdict)

    # --- stages

    def _from_stage(self, stage: int, said: StageMessage) -> None:
        match said:
            case Measured():
                self._profiler.on_measured(stage, said)
            case Report() if self.runner is not None:
                try:
                    self.runner.report(said)
                except ValueError as error:
                    log.error("a report does not fit its plan: %s", error, extra={"stage": stage})
                    self._pipeline.give_up_on(stage, f"its report does not fit: {error}")
            case SwapReport() if self.runner is not None:
                self.runner.swapped(said)
            case Fault() if self.runner is not None and said.epoch == self.runner.wire_epoch:
                log.error("a stage could not carry out a plan: %s", said.message, extra={"stage": stage})
                self._metrics.stage_lost(stage, LossCause.FAULT)
                self.runner.broken(stage, said.seq or None)
                self._refresh_status()
            case _:
                pass  # of an epoch that is over, or of a newer stage

    def _cluster(self, message: Joined | Lost | PipelineChanged | ProfileKnown | ProfileFailed) -> None:
        match message:
            case Joined(epoch, stages) if epoch == self._pipeline.epoch and self._pipeline.joined:
                self._joined(stages)
            case Lost(stage, _):
                self._lost(stage)
            case ProfileKnown(profile) if self.runner is None and self._stages is not None:
                self._start(self._stages, SchedulerCore(self._settings.core_config(self._stages), profile))
            case _:
                pass  # a round that is over; or only the status has changed

    def _joined(self, stages: tuple[Ready, ...]) -> None:
        self._exchanged = self._identity not in (None, Identity.of(stages[0]))
        if self._exchanged:
            return  # the status says so
        self._stages = stages
        self.sessions.vocab_size = stages[0].vocab_size
        if self.runner is None:
            self._settings.core_config(stages)  # what cannot be served is said before anything is measured
            self._search.begin(stages, self._pipeline.epoch)
        else:
            self._resume(self.runner, stages)

    def _resume(self, runner: Runner, stages: tuple[Ready, ...]) -> None:
        runner.joined(self._pipeline.epoch, stages)
        pool_tokens = min(ready.num_blocks for ready in stages) * stages[0].block_size
        limit = runner.core.config.max_model_len
        self._desk.set_hello(replace(self._desk.hello, max_model_len=limit, max_request_tokens=min(limit, pool_tokens)))

    def _lost(self, stage: int) -> None:
        self._metrics.stage_lost(stage, LossCause.STREAM)
        self._stages = None
        self._search.cancel()
        if self.runner is not None:
            self.runner.wire_epoch = None  # the pipeline has begun its next round already
            self.runner.broken(stage, None)

    def _start(self, stages: tuple[Ready, ...], core: SchedulerCore) -> None:
        """From here on requests are scheduled."""
        settings = self._settings
        journal = None
        if settings.journal is not None:
            journal = JournalWriter(
                settings.journal,
                core.config,
                core.predictor.profile,
                settings.journal_file_size,
                settings.journal_files,
                settings.journal_keep,
            )
        self._identity = Identity.of(stages[0])
        self.runner = Runner(
            core=core,
            sessions=self.sessions,
            flights=Flights(settings.num_stages, settings.max_faults),
            swaps=SwapWatch(settings.num_stages),
            stages=self._pipeline,
            clock_ns=self._clock_ns,
            wake_at=self._wake_at,
            metrics=self._metrics,
            journal=journal,
            timeline=None if settings.timeline is None else Timeline(settings.timeline, settings.timeline_spans),
            traces=Traces.of_process(settings.num_stages, self._clock_ns),
            check=settings.check,
        )
        self._resume(self.runner, stages)
        grants, self._grants = self._grants, []
        for granted in grants:
            self._host(granted)
        for link, submit in self._desk.hold.release():
            self._submit(link, submit)

    # --- host memory

    def _host(self, message: HostGranted | HostLost) -> None:
        match message:
            case HostGranted() if self.runner is None:
                self._grants.append(message)
            case HostGranted(session, slots) if self.runner is not None and not session.closed:
                self.runner.host_granted(session, slots)
            case HostLost(session):
                self._grants = [granted for granted in self._grants if granted.session is not session]
                if self.runner is not None:
                    self.runner.host_lost(session)

    # --- time

    def _wake_at(self, at_ns: int) -> None:
        self._wish += 1
        self._timers.after(max(0, at_ns - self._clock_ns()) / _NS_PER_S, WakeUp(self._wish))

    def _timer(self, message: Input) -> None:
        match message:
            case WakeUp(number) if number == self._wish and self.runner is not None:
                self.runner.woke()
            case CheckProgress():
                self._check_progress()
                self._timers.after(PROGRESS_CHECK_S, CheckProgress())
            case HoldOver():
                self._desk.hold.refuse_all(Refusal.NOT_READY, f"the pipeline is not ready: {self._desk.status.detail}")
            case Drain():
                self._stop_accepting(GOING_AWAY)
            case Ordered(act):
                act()
            case _:
                pass  # a wish that was replaced

    def _check_progress(self) -> None:
        if self.runner is None:
            return
        if self.runner.journal is not None:
            self.runner.journal.flush()
        least_ns = int(self._settings.stall_timeout * _NS_PER_S)
        swap_ns = int(self._settings.swap_timeout * _NS_PER_S)
        for stage, why in self.runner.silent_stages(least_ns, swap_ns).items():
            log.error(why, extra={"stage": stage})
            self._pipeline.give_up_on(stage, why)

    def _stop_accepting(self, detail: str) -> None:
        self._desk.draining, self._desk.draining_detail = True, detail
        self._desk.hold.refuse_all(Refusal.DRAINING, detail)
        self._refresh_status()

    # --- operators

    @property
    def settings(self) -> SchedulerSettings:
        return self._settings

    @property
    def draining(self) -> bool:
        return self._desk.draining

    def reconfigure(self, settings: SchedulerSettings) -> None:
        """From here on these hold. Raises SettingsError, and has then changed nothing."""
        if self.runner is not None:
            self.runner.reconfigure(settings.changed_core_config(self.runner.core.config))
        self._settings = settings
        self._desk.hold.max_requests = settings.max_num_queued_reqs
        self._desk.hold.max_tokens = settings.max_num_queued_tokens
        self._desk.set_hello(replace(self._desk.hello, policy=settings.policy))

    def drain(self) -> None:
        """Refuse new requests; those in progress go on."""
        if not self._desk.draining:
            self._stop_accepting(DRAINED_BY_OPERATOR)

    def resume(self) -> None:
        """Ends what `drain` began. A process that is about to end is not held up."""
        if self._desk.draining_detail == DRAINED_BY_OPERATOR:
            self._desk.draining, self._desk.draining_detail = False, GOING_AWAY
            self.drained.clear()
            self._refresh_status()

    def hand_over(self) -> list[tuple[Link, Submit]]:
        """Everything that others can go on with, with what it has so far; this pipeline forgets it."""
        moved: list[tuple[Link, Submit]] = list(self._desk.hold.release())
        for job_id in self.sessions.job_ids:
            handed = self.sessions.hand_over(job_id)
            if handed is not None:
                moved.append(handed)
                self._abort(job_id, StopReason.MOVED)
        return moved

    @property
    def identity(self) -> Identity | None:
        """Of what is served; None until it is known."""
        return self._identity

    def cancel_request(self, request_id: str) -> bool:
        """False when it is not live."""
        session = self.sessions.of_request(request_id)
        if session is None:
            return False
        self._abort(session.job_id, StopReason.CANCELLED)
        return True

    # --- what others may know

    def snapshot(self) -> Snapshot | None:
        """None before the first pipeline is ready. Loop's thread only."""
        return None if self.runner is None else self.runner.core.snapshot()

    def _refresh_status(self) -> None:
        status = self._status()
        if self._desk.set_status(status):
            log.info("ready" if status.ready else f"not ready: {status.detail}")
            self._on_status(status)

    def _status(self) -> Status:
        if self._desk.draining:
            return Status(False, self._desk.draining_detail)
        if self._pipeline.detail:
            return Status(False, self._pipeline.detail)
        if self.runner is None:
            return Status(False, self._search.state)
        if self._exchanged:
            return Status(False, "the stages now serve another model or shape; restart the scheduler to serve it")
        return Status(self.runner.wire_epoch is not None, "" if self.runner.wire_epoch else "joining the stages")
