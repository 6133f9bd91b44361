"""The core driven by a heap of events instead of the network. Same core, same events, same commands as live.

Stages are a pipeline: a plan enters stage i when it has left stage i-1 and the stage is free. The result is the event
of the last stage's end, and carries the sum of the stages' compute times, as the live pipeline reports it.

Each stage has a link of its own to the host, whose directions copy one swap at a time beside the computing. The plan
reaches all stages at once: a copy in starts when its direction is free, a copy out also not before the stage has
computed the plans that came earlier.
"""

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import assert_never

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
from fastserve_scheduler.core.events import Event, HostSlotsGranted, IterationDone, JobArrived, StageUp, SwapDone, Woke
from fastserve_scheduler.core.scheduler import SchedulerCore
from fastserve_scheduler.sim.cost import CostModel, LinkCost


@dataclass(slots=True)
class JobRecord:
    """What a client would have seen of one job; times in ns, -1 where it did not come to that."""

    job_id: int
    prompt_tokens: int
    arrived_ns: int
    first_token_ns: int = -1
    finished_ns: int = -1
    output_tokens: int = 0
    reason: FinishReason | RejectReason | None = None
    #: Longest time without a token, from arrival on.
    max_gap_ns: int = 0
    #: Tokens computed more than once.
    recomputed_tokens: int = 0
    #: Iterations it took part in.
    iterations: int = 0
    _last_token_ns: int = 0
    _reached: int = 0

    @property
    def latency_ns(self) -> int:
        return self.finished_ns - self.arrived_ns


@dataclass(slots=True)
class Result:
    """A finished simulation. `busy_ns`: compute time of each stage."""

    jobs: dict[int, JobRecord]
    end_ns: int
    busy_ns: list[int]
    events: list[tuple[int, Event]]
    commands: list[Command]

    def finished(self) -> list[JobRecord]:
        """In the order of completion."""
        done = [job for job in self.jobs.values() if isinstance(job.reason, FinishReason)]
        return sorted(done, key=lambda job: (job.finished_ns, job.job_id))


@dataclass(slots=True)
class Simulator:
    """`stops`: output tokens after which the model stops by itself, by job; others run to their limit.

    `check`: prove the core's invariants after each event (slow). `keep_log`: keep events and commands. `watch` is
    called with every plan when it starts.
    """

    core: SchedulerCore
    cost: CostModel
    stops: dict[int, int] = field(default_factory=dict)
    check: bool = False
    keep_log: bool = False
    watch: Callable[[int, RunIteration], None] | None = None
    link: LinkCost = field(default_factory=LinkCost)
    _heap: list[tuple[int, int, Event]] = field(default_factory=list)
    _pushed: int = 0
    _records: dict[int, JobRecord] = field(default_factory=dict)
    _plans: dict[tuple[int, int], RunIteration] = field(default_factory=dict)
    _stage_free_ns: list[int] = field(default_factory=list)
    _busy_ns: list[int] = field(default_factory=list)
    _link_free_ns: dict[tuple[int, SwapDirection], int] = field(default_factory=dict)
    _events: list[tuple[int, Event]] = field(default_factory=list)
    _commands: list[Command] = field(default_factory=list)

    def run(
        self,
        arrivals: Iterable[tuple[int, Event]],
        num_blocks: int,
        until_ns: int | None = None,
        host_slots: int = 0,
    ) -> Result:
        """Bring all stages up with `num_blocks` blocks each, then play the events until nothing is left to do.

        `host_slots`: blocks of every stage that the host holds. With `until_ns` the run ends there, jobs unfinished.
        """
        num_stages = self.core.config.num_stages
        self._stage_free_ns, self._busy_ns = [0] * num_stages, [0] * num_stages
        for stage in range(num_stages):
            self._push(0, StageUp(stage, num_blocks))
        if host_slots:
            self._push(0, HostSlotsGranted(tuple(range(host_slots))))
        for at_ns, event in arrivals:
            self._push(at_ns, event)
        now_ns = 0
        while self._heap and (until_ns is None or self._heap[0][0] <= until_ns):
            now_ns, _, event = heapq.heappop(self._heap)
            self._play(event, now_ns)
        return Result(self._records, now_ns, self._busy_ns, self._events, self._commands)

    def _push(self, at_ns: int, event: Event) -> None:
        heapq.heappush(self._heap, (at_ns, self._pushed, event))
        self._pushed += 1

    def _play(self, event: Event, now_ns: int) -> None:
        match event:
            case JobArrived(job_id, prompt_tokens):
                self._records[job_id] = JobRecord(job_id, prompt_tokens, now_ns, _last_token_ns=now_ns)
            case IterationDone():
                plan = self._plans.pop((event.epoch, event.seq), None)
                if plan is not None:
                    self._deliver(plan, now_ns)
            case _:
                pass
        commands = self.core.handle(event, now_ns)
        if self.keep_log:
            self._events.append((now_ns, event))
            self._commands += commands
        for command in commands:
            self._obey(command, now_ns)
        if self.check:
            self.core.check()

    def _obey(self, command: Command, now_ns: int) -> None:
        match command:
            case RunIteration():
                self._start(command, now_ns)
            case FinishJob(job_id, reason) | RejectJob(job_id, reason):
                self._records[job_id].reason = reason
                self._records[job_id].finished_ns = now_ns
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
        if self.watch is not None:
            self.watch(now_ns, plan)
        for stage, free_ns in enumerate(self._stage_free_ns):
            for op in plan.swaps:
                begin_ns = max(now_ns, free_ns) if op.direction is SwapDirection.OUT else now_ns
                self._copy(op, stage, plan.epoch, begin_ns)
        done_ns, compute_ns = now_ns, 0
        for stage in range(len(self._stage_free_ns)):
            cost_ns = self.cost.stage_ns(plan, stage) if plan.items else 0
            done_ns = max(done_ns, self._stage_free_ns[stage]) + cost_ns
            self._stage_free_ns[stage] = done_ns
            self._busy_ns[stage] += cost_ns
            compute_ns += cost_ns
        self._plans[plan.epoch, plan.seq] = plan
        stopped = tuple(
            item.job_id
            for item in plan.items
            if item.sample and item.output_position + 1 == self.stops.get(item.job_id, -1)
        )
        self._push(done_ns, IterationDone(plan.seq, plan.epoch, compute_ns, stopped))

    def _copy(self, op: SwapOp, stage: int, epoch: int, begin_ns: int) -> None:
        lane = (stage, op.direction)
        copy_ns = self.link.copy_ns(len(op.device_blocks))
        done_ns = max(begin_ns, self._link_free_ns.get(lane, 0)) + copy_ns
        self._link_free_ns[lane] = done_ns
        num_bytes = len(op.device_blocks) * self.link.block_bytes
        self._push(done_ns, SwapDone(op.swap_id, stage, epoch, True, num_bytes, copy_ns))

    def _deliver(self, plan: RunIteration, now_ns: int) -> None:
        """Note what the clients see of a plan that came through."""
        for item in plan.items:
            record = self._records[item.job_id]
            record.iterations += 1
            end = item.start + item.num_tokens
            record.recomputed_tokens += max(0, min(record._reached, end) - item.start)
            record._reached = max(record._reached, end)
            if item.sample:
                record.output_tokens = item.output_position + 1
                record.max_gap_ns = max(record.max_gap_ns, now_ns - record._last_token_ns)
                record._last_token_ns = now_ns
                if record.first_token_ns < 0:
                    record.first_token_ns = now_ns


def simulate(
    core: SchedulerCore,
    arrivals: Iterable[tuple[int, Event]],
    cost: CostModel,
    num_blocks: int,
    stops: dict[int, int] | None = None,
    host_slots: int = 0,
) -> Result:
    """Run to the end with every check on; the short form for tests."""
    simulator = Simulator(core, cost, stops or {}, check=True, keep_log=True)
    return simulator.run(arrivals, num_blocks, host_slots=host_slots)
