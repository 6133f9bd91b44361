"""One pipeline in simulated time: a core, its stages, and the links between stages and host.

Stages are a pipeline: a plan enters stage i when it has left stage i-1 and the stage is free. The result is the event
of the last stage's end, and carries the sum of the stages' compute times, as the live pipeline reports it.

Each stage has a link of its own to the host, whose directions copy one swap at a time beside the computing. The plan
reaches all stages at once: a copy in starts when its direction is free, a copy out also not before the stage has
computed the plans that came earlier.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, assert_never

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
from fastserve_scheduler.core.events import Event, HostSlotsGranted, IterationDone, StageUp, SwapDone, Woke
from fastserve_scheduler.core.scheduler import SchedulerCore
from fastserve_scheduler.sim.cost import CostModel, LinkCost

#: Puts an event of this replica into the heap of the run.
Push = Callable[[int, Event], None]


class Observer(Protocol):
    """Who writes down what clients would see. Times in ns."""

    def delivered(self, plan: RunIteration, began_ns: int, now_ns: int) -> None:
        """A plan came through; its sampled tokens are with the clients now."""

    def ended(self, job_id: int, reason: FinishReason | RejectReason, now_ns: int) -> None:
        """The job is finished, or refused."""


@dataclass(frozen=True, slots=True)
class Control:
    """What a live system adds to computing, measured there.

    `turn_ns`, and `turn_job_ns` for each job of the batch: from the end of an iteration on the last stage to its
    successor's start on the first one, less the computing: report, decision and plan on their way. `hop_ns`: from stage
    to stage.
    """

    turn_ns: int = 0
    hop_ns: int = 0
    turn_job_ns: int = 0


NO_CONTROL = Control()


class Replica:
    """`stops`: output tokens after which the model stops by itself, by job; others run to their limit.

    `watch` is called with every plan when it starts, `log` with every event and the core's answer.
    """

    def __init__(
        self,
        core: SchedulerCore,
        cost: CostModel,
        observer: Observer,
        push: Push,
        *,
        link: LinkCost | None = None,
        control: Control = NO_CONTROL,
        stops: dict[int, int] | None = None,
        watch: Callable[[int, RunIteration], None] | None = None,
        log: Callable[[int, Event, Sequence[Command]], None] | None = None,
    ) -> None:
        self.core, self.stops = core, {} if stops is None else stops
        self.busy_ns = [0] * core.config.num_stages
        #: The most blocks that jobs held on the device, and with those on the host.
        self.peak_device_blocks = 0
        self.peak_blocks = 0
        self._cost, self._observer, self._push = cost, observer, push
        self._link, self._control = link or LinkCost(), control
        self._watch, self._log = watch, log
        #: Plans in flight and when they were sent.
        self._plans: dict[tuple[int, int], tuple[RunIteration, int]] = {}
        self._stage_free_ns = [0] * core.config.num_stages
        self._link_free_ns: dict[tuple[int, SwapDirection], int] = {}

    def bring_up(self, num_blocks: int, host_slots: int) -> None:
        """All stages with `num_blocks` blocks each, and a host that holds `host_slots` blocks of every stage."""
        for stage in range(len(self.busy_ns)):
            self.play(StageUp(stage, num_blocks), 0)
        if host_slots:
            self.play(HostSlotsGranted(tuple(range(host_slots))), 0)

    def play(self, event: Event, now_ns: int) -> None:
        if type(event) is IterationDone:
            plan, began_ns = self._plans.pop((event.epoch, event.seq), (None, 0))
            if plan is not None:
                self._observer.delivered(plan, began_ns, now_ns)
        commands = self.core.handle(event, now_ns)
        if self._log is not None:
            self._log(now_ns, event, commands)
        for command in commands:
            self._obey(command, now_ns)

    def _obey(self, command: Command, now_ns: int) -> None:
        match command:
            case RunIteration():
                self._start(command, now_ns)
            case FinishJob(job_id, reason) | RejectJob(job_id, reason):
                self._observer.ended(job_id, reason, now_ns)
                self.stops.pop(job_id, None)
            case RaiseEpoch():
                self._plans.clear()
                self._stage_free_ns = [now_ns] * len(self._stage_free_ns)
                self._link_free_ns.clear()
            case WakeAt(at_ns):
                self._push(at_ns, Woke())
            case KeepHost() | FreeHost():
                pass  # the simulated arena has nothing to remember
            case _:
                assert_never(command)

    def _start(self, plan: RunIteration, now_ns: int) -> None:
        if self._watch is not None:
            self._watch(now_ns, plan)
        if plan.swaps:
            self._start_copies(plan, now_ns)
        done_ns, compute_ns = now_ns, 0
        if plan.items:
            done_ns, compute_ns = self._compute(plan, now_ns)
            self._note_peaks()
        self._plans[plan.epoch, plan.seq] = (plan, now_ns)
        stopped: tuple[int, ...] = ()
        if self.stops:
            stops = self.stops
            stopped = tuple(
                item.job_id
                for item in plan.items
                if item.sample and item.output_position + 1 == stops.get(item.job_id, -1)
            )
        self._push(done_ns, IterationDone(plan.seq, plan.epoch, compute_ns, stopped))

    def _compute(self, plan: RunIteration, now_ns: int) -> tuple[int, int]:
        """When the result is with the scheduler, and the time computed."""
        free_ns, cost, hop_ns = self._stage_free_ns, self._cost, self._control.hop_ns
        done_ns, compute_ns = now_ns, 0
        for stage in range(len(free_ns)):
            cost_ns = cost.stage_ns(plan, stage)
            if stage:
                done_ns += hop_ns
            if free_ns[stage] > done_ns:
                done_ns = free_ns[stage]
            done_ns += cost_ns
            free_ns[stage] = done_ns
            self.busy_ns[stage] += cost_ns
            compute_ns += cost_ns
        return done_ns + self._control.turn_ns + self._control.turn_job_ns * len(plan.items), compute_ns

    def _start_copies(self, plan: RunIteration, now_ns: int) -> None:
        for stage, free_ns in enumerate(self._stage_free_ns):
            for op in plan.swaps:
                begin_ns = max(now_ns, free_ns) if op.direction is SwapDirection.OUT else now_ns
                self._copy(op, stage, plan.epoch, begin_ns)

    def _copy(self, op: SwapOp, stage: int, epoch: int, begin_ns: int) -> None:
        lane = (stage, op.direction)
        copy_ns = self._link.copy_ns(len(op.device_blocks))
        done_ns = max(begin_ns, self._link_free_ns.get(lane, 0)) + copy_ns
        self._link_free_ns[lane] = done_ns
        num_bytes = len(op.device_blocks) * self._link.block_bytes
        self._push(done_ns, SwapDone(op.swap_id, stage, epoch, True, num_bytes, copy_ns))

    def _note_peaks(self) -> None:
        pool, host = self.core.pool, self.core.tiers.host
        device = pool.num_blocks - pool.num_free
        if device > self.peak_device_blocks:
            self.peak_device_blocks = device
        total = device + host.num_slots - host.num_free
        if total > self.peak_blocks:
            self.peak_blocks = total
