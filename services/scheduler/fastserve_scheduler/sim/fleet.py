"""Replicas behind a router, in one heap of events, fed by requests that are drawn when their time has come."""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from fastserve_scheduler.core.commands import Command, FinishReason, RejectReason, RunIteration
from fastserve_scheduler.core.config import CoreConfig
from fastserve_scheduler.core.events import Event, JobArrived
from fastserve_scheduler.core.profile import Profile
from fastserve_scheduler.core.scheduler import SchedulerCore
from fastserve_scheduler.sim.arrivals import Request
from fastserve_scheduler.sim.cost import CostModel, LinkCost
from fastserve_scheduler.sim.recorder import Recorder
from fastserve_scheduler.sim.replica import NO_CONTROL, Control, Replica
from fastserve_scheduler.sim.router import RoundRobin, Router

#: What comes after an answered request, or None.
FollowUp = Callable[[Request, int], Request | None]

#: Called with the number of requests that ended.
Progress = Callable[[int], None]

PROGRESS_STEP = 256
"""Ends between two calls of Progress."""


@dataclass(frozen=True, slots=True)
class Plant:
    """One replica as data: what it runs on and how it is configured. `num_blocks`, `host_slots` in blocks of KV."""

    config: CoreConfig
    profile: Profile
    cost: CostModel
    num_blocks: int
    host_slots: int = 0
    link: LinkCost = field(default_factory=LinkCost)
    control: Control = NO_CONTROL


@dataclass(slots=True)
class Outcome:
    """A finished run. `offered` counts requests that came, refused ones included."""

    plant: Plant
    recorder: Recorder
    replicas: list[Replica]
    end_ns: int

    @property
    def offered(self) -> int:
        return self.recorder.arrived


def to_event(job_id: int, request: Request) -> JobArrived:
    return JobArrived(
        job_id,
        request.prompt_tokens,
        request.max_output_tokens or request.output_tokens,
        service_class=request.service_class,
        oracle_output_tokens=request.output_tokens,
        expected_output_tokens=request.expected_output_tokens,
        program=request.program,
    )


class Fleet:
    """`check`: prove the core's invariants after each event (slow). `log`: called with every event of the first
    replica and its answer. `arrival`: makes the core's event of a request."""

    def __init__(
        self,
        plant: Plant,
        *,
        num_replicas: int = 1,
        router: Router | None = None,
        check: bool = False,
        log: Callable[[int, Event, Sequence[Command]], None] | None = None,
        arrival: Callable[[int, Request], JobArrived] = to_event,
    ) -> None:
        self.plant, self._router, self._check, self._arrival = plant, router or RoundRobin(), check, arrival
        self.recorder = Recorder()
        self._heap: list[tuple[int, int, int, Event | Request]] = []
        self._pushed = 0
        self._answered: list[Request] = []
        self._ended = 0
        self._next_id = 1
        self.replicas = [self._replica(index, log if index == 0 else None) for index in range(num_replicas)]

    def _replica(self, index: int, log: Callable[[int, Event, Sequence[Command]], None] | None) -> Replica:
        def push(at_ns: int, event: Event) -> None:
            self._push(at_ns, index, event)

        plant = self.plant
        core = SchedulerCore(plant.config, plant.profile)
        replica = Replica(core, plant.cost, self, push, link=plant.link, control=plant.control, log=log)
        replica.bring_up(plant.num_blocks, plant.host_slots)
        return replica

    def _push(self, at_ns: int, index: int, event: Event | Request) -> None:
        heapq.heappush(self._heap, (at_ns, self._pushed, index, event))
        self._pushed += 1

    def run(
        self,
        requests: Iterable[Request],
        *,
        follow_up: FollowUp | None = None,
        until_ns: int | None = None,
        progress: Progress | None = None,
    ) -> Outcome:
        """Play the requests, which come in order of time, and what follows from them, until nothing is left to do.

        With `until_ns` the run ends there, requests unfinished. An arrival precedes everything else of its instant.
        """
        heap, replicas = self._heap, self.replicas
        source = iter(requests)
        upcoming = next(source, None)
        now_ns, told = 0, 0
        event: Event | Request
        while upcoming is not None or heap:
            if upcoming is not None and (not heap or upcoming.at_ns <= heap[0][0]):
                at_ns, index, event = upcoming.at_ns, 0, upcoming
                if until_ns is not None and at_ns > until_ns:
                    break
                upcoming = _following(source, upcoming)
            else:
                if until_ns is not None and heap[0][0] > until_ns:
                    break
                at_ns, _, index, event = heapq.heappop(heap)
            now_ns = at_ns
            if isinstance(event, Request):
                self._arrive(event)
            else:
                replicas[index].play(event, now_ns)
            if self._answered:
                self._follow(follow_up, now_ns)
            if self._check:
                for replica in replicas:
                    replica.core.check()
            if progress is not None and self._ended - told >= PROGRESS_STEP:
                told = self._ended
                progress(told)
        return Outcome(self.plant, self.recorder, replicas, now_ns)

    def _arrive(self, request: Request) -> None:
        job_id = self._next_id
        self._next_id += 1
        index = self._router.choose(self.replicas)
        replica = self.replicas[index]
        self.recorder.arrive(job_id, request, index)
        limit = request.max_output_tokens
        if limit and request.output_tokens < limit:
            replica.stops[job_id] = request.output_tokens
        replica.play(self._arrival(job_id, request), request.at_ns)

    def _follow(self, follow_up: FollowUp | None, now_ns: int) -> None:
        answered, self._answered = self._answered, []
        if follow_up is None:
            return
        for request in answered:
            following = follow_up(request, now_ns)
            if following is not None:
                self._push(following.at_ns, 0, following)

    # ---- the replicas' observer

    def delivered(self, plan: RunIteration, began_ns: int, now_ns: int) -> None:
        self.recorder.delivered(plan, began_ns, now_ns)

    def ended(self, job_id: int, reason: FinishReason | RejectReason, now_ns: int) -> None:
        self._answered.append(self.recorder.request_of(job_id))
        self._ended += 1
        self.recorder.ended(job_id, reason, now_ns)


def _following(source: Iterator[Request], request: Request) -> Request | None:
    """Raises ValueError when it comes before the one before it."""
    following = next(source, None)
    if following is not None and following.at_ns < request.at_ns:
        raise ValueError(f"requests must come in order of time: {following} after {request}")
    return following
