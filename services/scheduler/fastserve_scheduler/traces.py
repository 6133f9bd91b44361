"""What traced requests lived through, read off the core's events and commands; spans are made when a request ends.

The core knows nothing of it. Requests that came without a traceparent cost nothing, and none come with one unless
tracing is on in the gateway.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from fastserve_common.tracing import Span, SpanEvent, Tracing, tracing
from fastserve_scheduler.core.commands import (
    Command,
    FinishJob,
    PlanItem,
    RaiseEpoch,
    RunIteration,
    SwapDirection,
    SwapOp,
)
from fastserve_scheduler.core.events import Event, IterationDone, JobArrived, SwapDone

#: Events of one span: a request that is preempted more often than this keeps its first ones.
MAX_EVENTS = 256
#: Plans whose reports are still awaited, at most: those on the way, with room for reports that overtake each other.
MAX_SENT = 64

_NS_PER_S = 1e9


@dataclass(slots=True)
class _StageShare:
    """What one stage did for a job."""

    begin_ns: int
    end_ns: int = 0
    iterations: int = 0
    compute_ns: int = 0


@dataclass(slots=True)
class _Job:
    request_id: str
    traceparent: str
    arrived_ns: int
    prompt_tokens: int
    first_run_ns: int = 0
    prefilled_ns: int = 0
    #: End of its last iteration, and the number of that.
    ran_ns: int = 0
    last_seq: int = 0
    computed: int = 0
    #: Since when it does not run though it could; 0: it runs, or has not begun.
    away_ns: int = 0
    output_tokens: int = 0
    num_preemptions: int = 0
    events: list[SpanEvent] = field(default_factory=list)
    stages: dict[int, _StageShare] = field(default_factory=dict)


@dataclass(slots=True)
class _Swap:
    job_id: int
    direction: SwapDirection
    begin_ns: int
    stages_left: int
    num_bytes: int = 0


class Traces:
    """Feed it everything the core is fed and says. `num_stages`: how many report a swap, and how many plans fly."""

    def __init__(self, tracing: Tracing, num_stages: int, epoch_offset_ns: int) -> None:
        """`epoch_offset_ns`: what makes an epoch time of a time of the core."""
        self._tracing, self._num_stages, self._offset_ns = tracing, num_stages, epoch_offset_ns
        self._jobs: dict[int, _Job] = {}
        self._swaps: dict[int, _Swap] = {}
        #: By the core's number: traced jobs of plans in flight, and how many tokens they will have.
        self._plans: dict[int, tuple[tuple[int, int], ...]] = {}
        #: By the wire's number: traced jobs of what was sent.
        self._sent: dict[int, tuple[int, ...]] = {}

    @classmethod
    def of_process(cls, num_stages: int, clock_ns: Callable[[], int]) -> "Traces | None":
        """None where tracing is off."""
        on = tracing()
        return None if on is None else cls(on, num_stages, time.time_ns() - clock_ns())

    def opened(self, job_id: int, request_id: str, traceparent: str, now_ns: int) -> None:
        """A request with a traceparent is about to arrive at the core."""
        self._jobs[job_id] = _Job(request_id, traceparent, now_ns, 0)

    def sent(self, seq: int, items: Iterable[PlanItem]) -> None:
        """Wire plan `seq` is on its way."""
        traced = tuple(item.job_id for item in items if item.job_id in self._jobs)
        if traced:
            self._sent[seq] = traced
            if len(self._sent) > MAX_SENT:
                del self._sent[next(iter(self._sent))]

    def computed(self, stage: int, seq: int, compute_ns: int, now_ns: int) -> None:
        """A stage has answered wire plan `seq`."""
        for job_id in self._sent.get(seq, ()):
            job = self._jobs.get(job_id)
            if job is not None:
                share = job.stages.setdefault(stage, _StageShare(now_ns - compute_ns))
                share.end_ns = now_ns
                share.iterations += 1
                share.compute_ns += compute_ns

    def record(self, now_ns: int, event: Event, commands: Iterable[Command]) -> None:
        """One step of the core."""
        if not self._jobs:
            return
        match event:
            case JobArrived() if event.job_id in self._jobs:
                self._jobs[event.job_id].prompt_tokens = event.prompt_tokens
            case IterationDone():
                self._done(event, now_ns)
            case SwapDone():
                self._swapped(event, now_ns)
            case _:
                pass
        for command in commands:
            match command:
                case RunIteration():
                    self._planned(command, now_ns)
                case RaiseEpoch():
                    self._lost()
                case FinishJob(job_id, reason) if job_id in self._jobs:
                    self._finish(self._jobs.pop(job_id), reason.value, now_ns)
                case _:
                    pass

    def refused(self, job_id: int, why: str, now_ns: int) -> None:
        """The core refused it at the door."""
        job = self._jobs.pop(job_id, None)
        if job is not None:
            self._finish(job, why, now_ns, error=why)

    def _lost(self) -> None:
        """Everything in flight is void, and no stage holds anything: computing again is no preemption."""
        self._plans.clear()
        self._sent.clear()
        self._swaps.clear()
        for job in self._jobs.values():
            job.computed = 0

    def _planned(self, plan: RunIteration, now_ns: int) -> None:
        for op in plan.swaps:
            self._swap_ordered(op, now_ns)
        traced = []
        for item in plan.items:
            job = self._jobs.get(item.job_id)
            if job is None:
                continue
            traced.append((item.job_id, item.output_position + 1 if item.sample else 0))
            if not job.first_run_ns:
                job.first_run_ns = now_ns
            elif plan.seq - job.last_seq > self._num_stages or item.start < job.computed or job.away_ns:
                self._preempted(job, job.ran_ns)
                waited_s = (now_ns - job.away_ns) / _NS_PER_S
                recomputed = max(0, job.computed - item.start)
                self._note(job, "resume", now_ns, {"waited_s": waited_s, "recomputed_tokens": recomputed})
                job.away_ns = 0
            job.last_seq, job.computed = plan.seq, item.start + item.num_tokens
        if traced:
            self._plans[plan.seq] = tuple(traced)

    def _done(self, event: IterationDone, now_ns: int) -> None:
        for job_id, output_tokens in self._plans.pop(event.seq, ()):
            job = self._jobs.get(job_id)
            if job is not None:
                job.ran_ns = now_ns
                job.output_tokens = max(job.output_tokens, output_tokens)
                if output_tokens and not job.prefilled_ns:
                    job.prefilled_ns = now_ns

    def _preempted(self, job: _Job, at_ns: int) -> None:
        """Once per absence."""
        if not job.away_ns:
            job.away_ns = at_ns or job.first_run_ns
            job.num_preemptions += 1
            self._note(job, "preempt", job.away_ns)

    def _swap_ordered(self, op: SwapOp, now_ns: int) -> None:
        job = self._jobs.get(op.job_id)
        if job is None:
            return
        if op.direction is SwapDirection.OUT:
            self._preempted(job, job.ran_ns)
        self._swaps[op.swap_id] = _Swap(op.job_id, op.direction, now_ns, self._num_stages)

    def _swapped(self, event: SwapDone, now_ns: int) -> None:
        """The event stands where the copy began, and says how long it took."""
        swap = self._swaps.get(event.swap_id)
        if swap is None:
            return
        swap.num_bytes += event.num_bytes
        swap.stages_left -= 1
        if swap.stages_left and event.ok:
            return
        del self._swaps[event.swap_id]
        job = self._jobs.get(swap.job_id)
        if job is not None:
            facts = {"bytes": swap.num_bytes, "seconds": (now_ns - swap.begin_ns) / _NS_PER_S, "ok": int(event.ok)}
            self._note(job, f"swap-{swap.direction.value}", swap.begin_ns, facts)

    def _note(self, job: _Job, name: str, at_ns: int, facts: dict[str, int | float] | None = None) -> None:
        if len(job.events) < MAX_EVENTS:
            job.events.append(SpanEvent(name, at_ns + self._offset_ns, facts or {}))

    def _finish(self, job: _Job, reason: str, now_ns: int, error: str = "") -> None:
        begun_ns, prefilled_ns = job.first_run_ns or now_ns, job.prefilled_ns or now_ns
        span = self._begin("schedule", job.traceparent, job.arrived_ns)
        for name, begin_ns, end_ns in _phases(job, begun_ns, prefilled_ns, now_ns):
            self._begin(name, span.traceparent, begin_ns).end(at_ns=end_ns + self._offset_ns)
        for stage, share in sorted(job.stages.items()):
            self._begin(f"stage {stage}", span.traceparent, share.begin_ns).end(
                at_ns=share.end_ns + self._offset_ns,
                attributes={
                    "fastserve.stage": stage,
                    "fastserve.iterations": share.iterations,
                    "fastserve.compute_seconds": share.compute_ns / _NS_PER_S,
                },
            )
        span.end(
            at_ns=now_ns + self._offset_ns,
            attributes={
                "gen_ai.request.id": job.request_id,
                "gen_ai.usage.prompt_tokens": job.prompt_tokens,
                "gen_ai.usage.completion_tokens": job.output_tokens,
                "gen_ai.latency.time_in_queue": (begun_ns - job.arrived_ns) / _NS_PER_S,
                "gen_ai.latency.time_in_model_prefill": max(0, prefilled_ns - begun_ns) / _NS_PER_S,
                "gen_ai.latency.time_in_model_decode": max(0, now_ns - prefilled_ns) / _NS_PER_S,
                "fastserve.preemptions": job.num_preemptions,
                "fastserve.finish_reason": reason,
            },
            events=sorted(job.events, key=lambda event: event.at_ns),
            error=error,
        )

    def _begin(self, name: str, parent: str, at_ns: int) -> Span:
        return self._tracing.begin(name, parent=parent, at_ns=at_ns + self._offset_ns)


def _phases(job: _Job, begun_ns: int, prefilled_ns: int, now_ns: int) -> Sequence[tuple[str, int, int]]:
    """Those that the request came to."""
    phases = [("queue", job.arrived_ns, begun_ns)]
    if job.first_run_ns:
        phases.append(("prefill", begun_ns, prefilled_ns))
    if job.prefilled_ns:
        phases.append(("decode", prefilled_ns, now_ns))
    return phases
