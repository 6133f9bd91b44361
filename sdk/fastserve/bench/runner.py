"""Sends requests at their times and writes down what happened. Open loop, unless --max-concurrency closes it."""

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fastserve.bench.backends import Backend, BackendError, Reply
from fastserve.bench.metrics import Outcome, Run
from fastserve.bench.workload import Request

#: Called after each request.
OnDone = Callable[[Outcome], None]


@dataclass(frozen=True, slots=True)
class Measured:
    """`cpu_s`: processor time that this client used, all threads."""

    run: Run
    cpu_s: float


@dataclass(slots=True)
class _Clock:
    """Seconds since the run began."""

    began_s: float = field(default_factory=time.perf_counter)

    def now_s(self) -> float:
        return time.perf_counter() - self.began_s


@dataclass(frozen=True)
class Runner:
    """`timeout_s`: of one request, from its sending; None is none. `max_concurrency`: requests in flight at most."""

    backend: Backend
    timeout_s: float | None = None
    max_concurrency: int | None = None

    async def run(
        self, requests: Sequence[Request], offsets_s: Sequence[float], on_done: OnDone = lambda _: None
    ) -> Measured:
        """One outcome per request, in order; a failed request is an outcome with an error, never an exception."""
        prepared = [self.backend.prepare(request) for request in requests]
        slots = asyncio.Semaphore(self.max_concurrency or len(requests) or 1)
        outcomes = [Outcome(planned_s=offset_s) for offset_s in offsets_s]
        gc.collect()
        gc.freeze()  # the workload is not garbage: keep the collector from reading it during the run
        cpu_s, clock = time.process_time(), _Clock()
        try:
            async with asyncio.TaskGroup() as tasks:
                for request, ready, outcome in zip(requests, prepared, outcomes, strict=True):
                    wait_s = outcome.planned_s - clock.now_s()
                    if wait_s > 0:
                        await asyncio.sleep(wait_s)
                    tasks.create_task(self._one(request, ready, outcome, slots, clock, on_done))
        finally:
            gc.unfreeze()
        return Measured(Run(outcomes, clock.now_s()), time.process_time() - cpu_s)

    async def _one(
        self,
        request: Request,
        ready: object,
        outcome: Outcome,
        slots: asyncio.Semaphore,
        clock: _Clock,
        on_done: OnDone,
    ) -> None:
        held_back = slots.locked()
        async with slots:
            outcome.sent_s = clock.now_s()
            # Held back: released by the slot. Else by the plan, and what has passed since is the client's own lag.
            outcome.released_s = outcome.sent_s if held_back else outcome.planned_s
            reply = Reply()
            try:
                async with asyncio.timeout(self.timeout_s):
                    await self.backend.generate(ready, reply)
            except TimeoutError:
                outcome.error = f"no complete answer within {self.timeout_s:g} s"
            except BackendError as error:
                outcome.error = str(error)
            _fill(outcome, request, reply, clock)
        on_done(outcome)


def _fill(outcome: Outcome, request: Request, reply: Reply, clock: _Clock) -> None:
    outcome.arrival_s = [time_s - clock.began_s for time_s in reply.arrival_s]
    outcome.token_counts = reply.token_counts
    outcome.end_s = reply.end_s - clock.began_s if reply.end_s and outcome.ok else clock.now_s()
    outcome.input_tokens = reply.input_tokens or request.input_tokens
    outcome.output_tokens = reply.output_tokens or sum(reply.token_counts)
    outcome.text = "".join(reply.texts)
    if outcome.ok and not reply.arrival_s:
        outcome.error = "the answer has no token"
