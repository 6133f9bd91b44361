"""Plans on their way through the stages: which report answers which, and which request breaks a stage.

Normally a plan travels whole. When a stage faulted (or died, or stalled) on a plan, every job in it is a *suspect*
until it gets past the place where that happened; a plan with suspects is cut into parts: the others together, then
each suspect by itself with nothing else in flight. A fault on a part of one job is that job's own fault, so a request
that breaks stages is found after one shared fault, and its batch mates are never blamed for it. Swaps go with the
first part.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from fastserve_scheduler.core.commands import PlanItem, RunIteration, SwapOp
from fastserve_scheduler.core.events import IterationDone
from fastserve_scheduler.messages import Report


@dataclass(slots=True)
class _Suspicion:
    #: Position after the last token of the span that faulted: computing it again clears the job.
    until: int
    #: Faults of this job by itself since it last got past `until`.
    own_faults: int = 0


@dataclass(slots=True, eq=False)
class Flight:
    """One plan of the core, in one part or several."""

    plan: RunIteration
    parts_left: int
    host_generation: int = 0
    compute_ns: int = 0
    stopped: list[int] = field(default_factory=list)

    def done(self) -> IterationDone:
        return IterationDone(self.plan.seq, self.plan.epoch, self.compute_ns, tuple(sorted(self.stopped)))


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What one wire plan carries. `seq` is the wire's own number: it never repeats."""

    seq: int
    items: tuple[PlanItem, ...]
    swaps: tuple[SwapOp, ...]
    flight: Flight
    #: Carries a suspect: nothing else may be in flight with it.
    alone: bool

    @property
    def num_samples(self) -> int:
        return sum([item.sample for item in self.items])


class Flights:
    """Pure bookkeeping. `max_faults`: own faults in a row after which a job is convicted."""

    def __init__(self, num_stages: int, max_faults: int) -> None:
        self._last_stage = num_stages - 1
        self._max_faults = max_faults
        self._next_seq = 1
        self._waiting: deque[Part] = deque()
        self._flying: dict[int, Part] = {}
        self._reported: dict[int, int] = {}
        self._suspects: dict[int, _Suspicion] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._flying)

    def add(self, plan: RunIteration, host_generation: int = 0) -> None:
        """A new plan, its swaps with host memory of `host_generation`. `departures` says what to send now."""
        suspects = [item for item in plan.items if item.job_id in self._suspects] if self._suspects else []
        others = tuple([item for item in plan.items if item not in suspects]) if suspects else plan.items
        groups = [(others, False)] if others or not suspects else []
        groups += [((item,), True) for item in suspects]
        flight = Flight(plan, len(groups), host_generation)
        swaps = plan.swaps
        for items, alone in groups:
            self._waiting.append(Part(self._next_seq, items, swaps, flight, alone))
            self._next_seq += 1
            swaps = ()

    def departures(self) -> list[Part]:
        """Parts to send now, in order; they are in flight from here on."""
        going = []
        while self._waiting and self._may_fly(self._waiting[0]):
            part = self._waiting.popleft()
            self._flying[part.seq] = part
            going.append(part)
        return going

    def _may_fly(self, part: Part) -> bool:
        return not self._flying or not (part.alone or any(other.alone for other in self._flying.values()))

    def answered(self, report: Report) -> Part | None:
        """The part that the last stage's `report` completes; None for a repeated, late or earlier stage's report.

        Raises ValueError when the report does not fit its plan.
        """
        part = self._flying.get(report.seq)
        if part is None:
            return None
        self._reported[report.seq] = max(self._reported.get(report.seq, -1), report.stage)
        if report.stage != self._last_stage:
            return None
        if len(report.token_ids) != part.num_samples:
            raise ValueError(f"{len(report.token_ids)} token ids for {part.num_samples} sampled items")
        if report.logprobs and len(report.logprobs) != part.num_samples:
            raise ValueError(f"{len(report.logprobs)} log probabilities for {part.num_samples} sampled items")
        return part

    def landed(self, part: Part, compute_ns: int, stopped: Iterable[int]) -> IterationDone | None:
        """Take a completed part out; the core's event when it was the last of its plan."""
        del self._flying[part.seq]
        self._reported.pop(part.seq, None)
        if self._suspects:
            for item in part.items:
                self._clear(item)
        flight = part.flight
        flight.compute_ns += compute_ns
        flight.stopped.extend(stopped)
        flight.parts_left -= 1
        return flight.done() if flight.parts_left == 0 else None

    def _clear(self, item: PlanItem) -> None:
        suspicion = self._suspects.get(item.job_id)
        if suspicion is not None and item.start + item.num_tokens >= suspicion.until:
            del self._suspects[item.job_id]

    def broken(self, seq: int | None) -> tuple[int, ...]:
        """Everything in flight is void because plan `seq` (None: nobody knows which) broke a stage.

        Returns the jobs that must not be tried again.
        """
        parts = [p for p in self._flying.values() if seq is None or p.seq == seq]
        convicted = []
        for part in parts:
            own = len(part.items) == 1 and (seq is not None or len(parts) == 1)
            for item in part.items:
                if self._suspect(item, own).own_faults >= self._max_faults:
                    convicted.append(item.job_id)
        self._waiting.clear()
        self._flying.clear()
        self._reported.clear()
        return tuple(convicted)

    def _suspect(self, item: PlanItem, own: bool) -> _Suspicion:
        end = item.start + item.num_tokens
        suspicion = self._suspects.setdefault(item.job_id, _Suspicion(end))
        suspicion.until = max(suspicion.until, end)
        suspicion.own_faults += own
        return suspicion

    def forget(self, job_id: int) -> None:
        """The job is over."""
        self._suspects.pop(job_id, None)

    def oldest(self) -> Part | None:
        """The part that must be answered next."""
        return next(iter(self._flying.values()), None)

    def computed_before(self, seq: int, stage: int) -> bool:
        """Whether `stage` has computed everything in flight that was sent before plan `seq`."""
        return all(self._reported.get(flying, -1) >= stage for flying in self._flying if flying < seq)

    def silent_stage(self) -> int:
        """The stage whose turn it is to answer the oldest part."""
        part = self.oldest()
        return 0 if part is None else min(self._reported.get(part.seq, -1) + 1, self._last_stage)
