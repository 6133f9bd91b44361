"""The scheduler: `handle(event, now_ns) -> commands` is the only way in. Same events, same commands, always.

This module moves jobs between their states; everything it decides is asked of the parts: the order (`policies/`),
the KV policy (`kv/`), the batch former, the door, the rescue. KV changes hands in the tiers.
"""

from fastserve_scheduler.core.admission import Door
from fastserve_scheduler.core.batch import Batch, BatchFormer, Pick, Shortage
from fastserve_scheduler.core.commands import Command, FinishJob, FinishReason, PlanItem, RaiseEpoch, RunIteration
from fastserve_scheduler.core.config import CoreConfig
from fastserve_scheduler.core.due_clock import DueClock
from fastserve_scheduler.core.events import (
    ConfigChanged,
    Event,
    HostSlotsGranted,
    HostStoreDown,
    IterationDone,
    JobAborted,
    JobArrived,
    ProfileUpdated,
    StageDown,
    StageUp,
    SwapDone,
)
from fastserve_scheduler.core.flight import Flight
from fastserve_scheduler.core.history import Happening, History, Moment
from fastserve_scheduler.core.invariants import check
from fastserve_scheduler.core.job import NOT_IN_FLIGHT, Job
from fastserve_scheduler.core.lengths import Lengths
from fastserve_scheduler.core.memory import Memory
from fastserve_scheduler.core.policies import POLICIES, Order
from fastserve_scheduler.core.prediction import Predictor
from fastserve_scheduler.core.profile import Profile
from fastserve_scheduler.core.reconfigure import reconfigure
from fastserve_scheduler.core.rescue import Rescue
from fastserve_scheduler.core.snapshot import Counters, Snapshot, take
from fastserve_scheduler.core.wait_clock import WaitClock

MAX_AGED_PER_STEP = 64
"""Jobs whose place is looked at anew in one step because time has passed, so that a step stays short."""


class SchedulerCore:
    """The state of one pipeline. Not thread-safe: one task owns it.

    `handle` raises ValueError on an event that its sender must not send (a job id in use, a count that is not
    positive, a stage out of range) and has then changed nothing.
    """

    def __init__(self, config: CoreConfig, profile: Profile) -> None:
        self.config = config
        self.jobs: dict[int, Job] = {}
        self.flights: dict[int, Flight] = {}
        self.epoch = 0
        self.counters = Counters()
        self.predictor = Predictor(profile)
        self.lengths = Lengths()
        self.order = self.make_order()
        self.clock = WaitClock(config.mlfq.alpha_ns, config.service_classes)
        self._history = History()
        self.wire(Memory.of(config, profile, self.order, self.clock, self._history))
        self.rescue = Rescue(self.order, self.clock, self.tiers, self.record)
        self.due_clock = DueClock()
        self.num_flying = 0
        self.waiting_prompt_tokens = 0
        #: Predicted first iterations of the jobs that have had none.
        self.unstarted_ns = 0
        self._stage_blocks: dict[int, int] = {}
        self._was_ready = False
        self._next_seq = 0
        self._now_ns = 0

    def make_order(self) -> Order:
        """The configured policy's order, empty."""
        return POLICIES[self.config.policy](self.config, self.predictor, self.lengths)

    def wire(self, memory: Memory) -> None:
        """Put together what the configuration and the order decide; jobs are put in line elsewhere."""
        self.memory = memory
        self.pool, self.line, self.tiers, self.enst = memory.pool, memory.line, memory.tiers, memory.enst
        self._appetite = memory.appetite
        self._former = BatchFormer(self.config, self.order, self.line, self.tiers, memory.kv, self._flying)
        self._door = Door(self.config, self.pool, self.predictor)

    @property
    def now_ns(self) -> int:
        """Time of the last event."""
        return self._now_ns

    @property
    def stages_up(self) -> bool:
        return len(self._stage_blocks) == self.config.num_stages

    def handle(self, event: Event, now_ns: int) -> list[Command]:
        """Take note of the event and say what to do. Time that runs backwards is taken to stand still."""
        self._now_ns = self.tiers.now_ns = self.order.now_ns = max(self._now_ns, now_ns)
        out: list[Command] = []
        settled: list[Job] = []
        match event:
            case IterationDone():
                settled = self._iteration_done(event, out)
            case JobArrived():
                self._job_arrived(event, out)
            case JobAborted(job_id):
                if job_id not in self.jobs:
                    return []  # nothing has changed: not the time to look around, which drivers need not say
                self._job_aborted(self.jobs[job_id], out)
            case StageUp(stage, num_blocks):
                self._stage_up(stage, num_blocks, out)
            case StageDown(stage):
                self._stage_down(stage, out)
            case ProfileUpdated() | ConfigChanged():
                self._told(event)
            case HostSlotsGranted() | HostStoreDown() | SwapDone():
                self._host_event(event)
        if self.stages_up:
            self._step(settled, out)
        return out + self.tiers.say()

    def check(self) -> None:
        """Prove the invariants; raises InvariantViolation with the story of the job at fault."""
        check(self)

    def story(self, job_id: int) -> tuple[Moment, ...]:
        """What happened to the job lately, oldest first; empty when it was never here or is forgotten."""
        return self._history.of(job_id)

    def snapshot(self) -> Snapshot:
        return take(self, self._was_ready and self.stages_up, self._now_ns)

    # ---- events

    def _job_arrived(self, event: JobArrived, out: list[Command]) -> None:
        if event.job_id in self.jobs:
            raise ValueError(f"job {event.job_id} is already here")
        if event.prompt_tokens < 1 or event.max_output_tokens < 1 or event.output_tokens < 0:
            raise ValueError(f"job {event.job_id} has counts that cannot be: {event}")
        waiting = len(self.jobs) - self.num_flying
        refusal = self._door.refuse(event, self._was_ready, waiting, self.waiting_prompt_tokens)
        if refusal is not None:
            self.counters.rejected += 1
            out.append(refusal)
            return
        self.counters.accepted += 1
        job = Job.of(event, self.clock.class_of(event.service_class), self._now_ns)
        self.jobs[job.job_id] = job
        job.first_ns = self.predictor.first_iteration_ns(job.known_tokens)
        self.unstarted_ns += job.first_ns
        self.lengths.arrived(job)
        self.order.join(job)
        self.record(job, Happening.ARRIVED, job.level)
        self._appetite.arrived(self.pool.blocks_for(job.known_tokens))
        if job.generated >= job.max_output_tokens:
            self._finish(job, FinishReason.LENGTH, out)
        else:
            self._wait(job)

    def _job_aborted(self, job: Job, out: list[Command]) -> None:
        if job.in_flight:
            # Its blocks are being written; it ends when the iteration is settled.
            job.aborted = True
            self.record(job, Happening.ABORT_ASKED, job.seq)
        else:
            self._unwait(job)
            self._finish(job, FinishReason.ABORTED, out)

    def _iteration_done(self, event: IterationDone, out: list[Command]) -> list[Job]:
        """Settle the plan; the jobs that go on. A result of an earlier epoch or of no plan means nothing."""
        if event.epoch != self.epoch or event.seq not in self.flights:
            return []
        flight = self.flights.pop(event.seq)
        self.predictor.observe(flight.prompt_tokens, flight.num_decodes, flight.decode_context_tokens, event.compute_ns)
        if flight.jobs:
            self.tiers.link.observe_iteration(event.compute_ns)
        stopped = frozenset(event.stopped)
        charged_ns = self.order.charge_ns(event.compute_ns, max(len(flight.jobs), 1))
        settled = []
        for item, job in zip(flight.plan.items, flight.jobs, strict=True):
            self._land(job)
            reason = self._settle(job, item, charged_ns, job.job_id in stopped)
            if reason is None:
                self._wait(job)
                settled.append(job)
            else:
                self._finish(job, reason, out)
        return settled

    def _stage_up(self, stage: int, num_blocks: int, out: list[Command]) -> None:
        if not 0 <= stage < self.config.num_stages or num_blocks < 1:
            raise ValueError(f"stage {stage} with {num_blocks} blocks cannot be, of {self.config.num_stages} stages")
        known = self._stage_blocks.get(stage)
        if known == num_blocks:
            return
        if known is not None:
            self._stage_down(stage, out)
        self._stage_blocks[stage] = num_blocks
        if not self.stages_up:
            return
        self._was_ready = True
        self.pool.resize(min(self._stage_blocks.values()))
        self._restart_clocks()
        for job in tuple(self.jobs.values()):
            self._fit_into_pool(job, out)

    def _stage_down(self, stage: int, out: list[Command]) -> None:
        """All plans in flight are void and all KV is lost: a job's KV is whole on all stages or worth nothing."""
        if stage not in self._stage_blocks:
            return
        del self._stage_blocks[stage]
        self.epoch += 1
        self.due_clock.note(self._now_ns, 0, 0, idle=True)
        out.append(RaiseEpoch(self.epoch))
        flights, self.flights = tuple(self.flights.values()), {}
        for job in (job for flight in flights for job in flight.jobs):
            self._land(job)
            if job.aborted:
                self._finish(job, FinishReason.ABORTED, out)
            else:
                self._wait(job)
        self.tiers.stages_fell(self.epoch)

    def _restart_clocks(self) -> None:
        """After an outage: nobody was passed over while nothing could run. Deadlines change out of line only."""
        waiting = self.line.jobs()
        for job in waiting:
            self.line.take(job)
        self.rescue.restart_all(self._now_ns)
        for job in waiting:
            self.line.put(job)

    def _told(self, event: ProfileUpdated | ConfigChanged) -> None:
        match event:
            case ProfileUpdated(profile):
                self.predictor.update(profile)
                self.order.retime()
            case ConfigChanged(config):
                reconfigure(self, config)

    def _host_event(self, event: HostSlotsGranted | HostStoreDown | SwapDone) -> None:
        match event:
            case HostSlotsGranted(slots):
                self.tiers.host.grant(slots)
            case HostStoreDown():
                self.tiers.host_fell()
            case SwapDone(_, stage, epoch):
                if not 0 <= stage < self.config.num_stages:
                    raise ValueError(f"stage {stage} cannot have swapped, of {self.config.num_stages} stages")
                if epoch == self.epoch:
                    self.tiers.landed(event)

    # ---- states of a job

    def _wait(self, job: Job) -> None:
        self.clock.start(job, self._now_ns)
        self.line.put(job)
        self.waiting_prompt_tokens += job.prompt_tokens

    def _unwait(self, job: Job) -> None:
        self.line.take(job)
        self._leave_clock(job)

    def _leave_clock(self, job: Job) -> None:
        self.clock.stop(job)
        self.waiting_prompt_tokens -= job.prompt_tokens

    def _land(self, job: Job) -> None:
        job.seq = NOT_IN_FLIGHT
        self.num_flying -= 1

    def _settle(self, job: Job, item: PlanItem, charged_ns: int, stopped: bool) -> FinishReason | None:
        """Book what the iteration did for the job; why it is finished, or None."""
        job.computed += item.num_tokens
        job.high_water = max(job.high_water, job.computed)
        if job.aborted:
            return FinishReason.ABORTED
        if item.sample:
            job.generated += 1
            self.counters.generated_tokens += 1
            if not job.started:
                job.first_token_ns = self._now_ns
                self._has_started(job)
            self.record(job, Happening.RAN, job.generated)
            if stopped:
                return FinishReason.STOP
            if job.generated >= job.max_output_tokens:
                return FinishReason.LENGTH
        thrown_away = job.discarding and job.pending_tokens == 0
        if thrown_away:
            self.tiers.forget(job)
            self.record(job, Happening.DISCARDED, job.level)
        level = job.level
        self.order.ran(job, charged_ns, turn_over=item.sample or thrown_away)
        if job.level > level:
            self.record(job, Happening.DEMOTED, job.level)
        return None

    def _has_started(self, job: Job) -> None:
        job.started = True
        self.unstarted_ns -= job.first_ns
        job.first_ns = 0

    def _finish(self, job: Job, reason: FinishReason, out: list[Command]) -> None:
        """End a job that is neither in line nor in flight. What is being copied is freed when it has landed."""
        self.order.leave(job)
        self._has_started(job)
        if reason is not FinishReason.ABORTED:
            self.lengths.finished(job)
        job.aborted = True
        self.tiers.forget(job)
        del self.jobs[job.job_id]
        self.counters.finished += 1
        self.counters.times.ended(job, self._now_ns)
        self.record(job, Happening.FINISHED, job.generated)
        out.append(FinishJob(job.job_id, reason))

    def _fit_into_pool(self, job: Job, out: list[Command]) -> None:
        """A pool that came back smaller may not hold the longest answer any more: cut the answer, not the service."""
        room = self.pool.num_tokens - job.prompt_tokens
        if room >= job.max_output_tokens:
            return
        job.max_output_tokens = room
        self.record(job, Happening.SHORTENED, room)
        if job.generated >= room:
            self._unwait(job)
            self._finish(job, FinishReason.LENGTH, out)

    # ---- scheduling

    def _step(self, settled: list[Job], out: list[Command]) -> None:
        """Rescue who starves, then fill the pipeline."""
        self._age()
        if self.order.rescues:
            self.clock.least_alpha_ns = self.order.alpha_rounds * self._round_ns()
            self.rescue.step(self._now_ns)
        batch = Batch()
        formed = len(self.flights) < self.config.num_stages
        while len(self.flights) < self.config.num_stages:
            batch = self._former.form(self.num_flying)
            self._note_victims(batch)
            if batch.picks or self.tiers.swaps.unsent():
                plan = self._launch(batch.picks)
                out += [*self.tiers.say(), plan]
            if not batch.picks:
                break
        if formed:
            self.due_clock.note(self._now_ns, batch.num_blocked, batch.num_roomless, idle=self.num_flying == 0)
        for job in settled:
            if not job.in_flight and job.resident:
                self.counters.preemptions[batch.shortage_of(job)] += 1

    def _round_ns(self) -> int:
        """How long a round over all jobs takes, each of them having one iteration: a prefill is one by itself."""
        slots = self.config.max_batch_size * self.config.num_stages
        return self.unstarted_ns // self.config.num_stages + len(self.jobs) * self.tiers.link.iteration_ns // slots

    def _age(self) -> None:
        """Time alone has changed the place of some; those in flight are asked about when they have run."""
        for job in self.order.overdue(MAX_AGED_PER_STEP):
            if not job.in_flight:
                self.line.take(job)
                self.order.age(job)
                self.line.put(job)

    def _note_victims(self, batch: Batch) -> None:
        for victim, requester in batch.gave_way:
            self.counters.preemptions[Shortage.BLOCKS] += 1
            self.record(victim, Happening.EVICTED, requester.job_id)

    def _launch(self, picks: list[Pick]) -> RunIteration:
        seq = self._next_seq
        self._next_seq += 1
        for pick in picks:
            job = pick.job
            if not job.is_decode:
                job.discarding = self.order.discards(job)
                self.record(job, Happening.PREFILL, seq)
                self.counters.times.prefills(job, pick.num_tokens, self._now_ns)
                again = min(job.high_water, job.computed + pick.num_tokens) - job.computed
                self.counters.recomputed_tokens += max(0, again)
            job.seq, job.rescued = seq, False
            self.tiers.runs(job)
            self._leave_clock(job)
        self.num_flying += len(picks)
        self.counters.iterations += bool(picks)
        flight = Flight.of(picks, self.tiers.swaps.depart(), seq, self.epoch, self.config)
        self.flights[seq] = flight
        if picks:
            self._appetite.launched(sum(len(job.table) for job in self._flying()))
        return flight.plan

    def _flying(self) -> list[Job]:
        return [job for flight in self.flights.values() for job in flight.jobs]

    def record(self, job: Job, happening: Happening, detail: int) -> None:
        self._history.record(self._now_ns, job.job_id, happening, detail)
