"""One pipeline, driven by a heap of events instead of the network, with everything kept: for tests and short studies.

`fleet.py` is for long runs and several replicas; both drive the same `Replica`.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from fastserve_scheduler.core.commands import Command, FinishReason, RejectReason, RunIteration
from fastserve_scheduler.core.events import Event, HostSlotsGranted, JobArrived, StageUp
from fastserve_scheduler.core.scheduler import SchedulerCore
from fastserve_scheduler.sim.cost import CostModel, LinkCost
from fastserve_scheduler.sim.replica import NO_CONTROL, Control, Replica


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
    control: Control = NO_CONTROL
    _heap: list[tuple[int, int, Event]] = field(default_factory=list)
    _pushed: int = 0
    _records: dict[int, JobRecord] = field(default_factory=dict)
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
        replica = Replica(
            self.core,
            self.cost,
            self,
            self._push,
            link=self.link,
            control=self.control,
            stops=dict(self.stops),
            watch=self.watch,
            log=self._note if self.keep_log else None,
        )
        for stage in range(self.core.config.num_stages):
            self._push(0, StageUp(stage, num_blocks))
        if host_slots:
            self._push(0, HostSlotsGranted(tuple(range(host_slots))))
        for at_ns, event in sorted(arrivals, key=itemgetter(0)):
            self._push(at_ns, event)
        now_ns = 0
        while self._heap and (until_ns is None or self._heap[0][0] <= until_ns):
            now_ns, _, event = heapq.heappop(self._heap)
            if isinstance(event, JobArrived):
                record = JobRecord(event.job_id, event.prompt_tokens, now_ns, _last_token_ns=now_ns)
                self._records[event.job_id] = record
            replica.play(event, now_ns)
            if self.check:
                self.core.check()
        return Result(self._records, now_ns, replica.busy_ns, self._events, self._commands)

    def _push(self, at_ns: int, event: Event) -> None:
        heapq.heappush(self._heap, (at_ns, self._pushed, event))
        self._pushed += 1

    def _note(self, now_ns: int, event: Event, commands: Sequence[Command]) -> None:
        self._events.append((now_ns, event))
        self._commands += commands

    def ended(self, job_id: int, reason: FinishReason | RejectReason, now_ns: int) -> None:
        self._records[job_id].reason = reason
        self._records[job_id].finished_ns = now_ns

    def delivered(self, plan: RunIteration, began_ns: int, now_ns: int) -> None:
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
