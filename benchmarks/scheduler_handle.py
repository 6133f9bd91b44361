"""Cost of one scheduling step against the number of waiting jobs: it must not grow with it.

For each policy and each number of waiting jobs a core is filled with jobs without KV (a full pool keeps them out),
then the same number of iterations is settled and planned. The `swapped` cases have them wait on the host instead.
Reported: median CPU time of `handle(IterationDone)` and the ratio to the smallest number of the same policy. Compare
ratios within one run; absolute times depend on the machine.

    python benchmarks/scheduler_handle.py --waiting 100 10000 100000
"""

import argparse
import gc
import statistics
import time
from dataclasses import dataclass

from fastserve_scheduler.core import CoreConfig, MlfqConfig, Profile, SchedulerCore
from fastserve_scheduler.core.commands import RunIteration
from fastserve_scheduler.core.config import KvRanking
from fastserve_scheduler.core.events import HostSlotsGranted, IterationDone, JobArrived, StageUp, SwapDone
from fastserve_scheduler.core.host import HostCopy
from fastserve_scheduler.core.kv_state import KvState
from fastserve_scheduler.core.policies import POLICIES

MS = 1_000_000
OUTPUT = 1 << 14
"""Long enough that no job finishes during the measurement. The first job alone has one token, so that all others join
a batch together, whatever the policy."""

PROFILE = Profile(((1, MS), (1000, 1000 * MS)), ((1, 1, 10 * MS),))


@dataclass(frozen=True)
class Case:
    name: str
    policy: str
    alpha_ns: int
    kv_ranking: KvRanking | None = None
    """Not None: the jobs wait on the host, ranked so."""


CASES = [
    *(Case(policy, policy, 10**9 * MS) for policy in POLICIES),
    Case("all starving", "skip-join-mlfq", 1000 * MS),
    Case("swapped, order", "skip-join-mlfq", 10**9 * MS, "order"),
    Case("swapped, enst", "skip-join-mlfq", 10**9 * MS, "enst"),
]
"""Without starvation, where the number of waiting jobs must not matter; the default policy in its worst hour; and with
the waiting jobs on the host, where each step looks for who should come back."""


class Run:
    """A core with a full batch in flight and `waiting` jobs in line, and what its steps cost so far."""

    def __init__(self, case: Case, waiting: int, batch: int) -> None:
        self._core = SchedulerCore(
            CoreConfig(
                num_stages=1,
                block_size=1 << 15,
                max_batch_size=batch,
                max_batch_tokens=1 << 16,
                max_model_len=1 << 15,
                max_waiting_jobs=1 << 20,
                max_waiting_tokens=1 << 40,
                policy=case.policy,
                mlfq=MlfqConfig(alpha_ns=case.alpha_ns),
                kv_policy="recompute" if case.kv_ranking is None else "proactive",
                kv_ranking=case.kv_ranking or "order",
                kv_block_bytes=1,
            ),
            PROFILE,
        )
        self._core.handle(StageUp(0, 2 * batch), 0)
        self._now_ns = 0
        self.times_ns: list[int] = []
        if case.kv_ranking is not None:
            self._core.handle(HostSlotsGranted(tuple(range(2 * waiting))), 0)
        for number in range(batch + waiting):
            for command in self._core.handle(JobArrived(number, 8 + number % 90, OUTPUT if number else 1), 0):
                assert isinstance(command, RunIteration)
                self._plan = command
        if case.kv_ranking is not None:
            self._park()

    def _park(self) -> None:
        """Give every waiting job a host copy, as if it had been swapped out."""
        tiers = self._core.tiers
        for job in tuple(self._core.line.absent):
            tiers.line.take(job)
            job.host, job.computed = HostCopy(tiers.host.take(1), job.prompt_tokens), job.prompt_tokens
            job.kv, job.started, job.generated = KvState.HOST, True, 1
            tiers.line.put(job)
        self._core.check()

    def step(self) -> None:
        event = IterationDone(self._plan.seq, self._plan.epoch, 10 * MS)
        self._now_ns += 10 * MS
        begin_ns = time.thread_time_ns()
        commands = self._core.handle(event, self._now_ns)
        self.times_ns.append(time.thread_time_ns() - begin_ns)
        (self._plan,) = (command for command in commands if isinstance(command, RunIteration))
        self._land(self._plan)

    def _land(self, plan: RunIteration) -> None:
        """Copies are not what is measured: they land at once."""
        for op in plan.swaps:
            self._core.handle(SwapDone(op.swap_id, 0, plan.epoch, True, 1, MS), self._now_ns)


def costs_us(case: Case, waiting: list[int], batch: int, steps: int) -> list[float]:
    """Median step of each size. The sizes take turns, so that a slow moment of the machine meets them all."""
    runs = [Run(case, size, batch) for size in waiting]
    gc.collect()
    gc.disable()
    try:
        for _ in range(steps):
            for run in runs:
                run.step()
    finally:
        gc.enable()
    return [statistics.median(run.times_ns[steps // 4 :]) / 1000 for run in runs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waiting", type=int, nargs="+", default=[100, 10_000, 100_000])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--cases", nargs="+", default=[case.name for case in CASES])
    options = parser.parse_args()
    print(f"batch {options.batch}, {options.steps} steps; median us per step (ratio to {options.waiting[0]} waiting)")
    print(f"{'':16}" + "".join(f"{waiting:>18}" for waiting in options.waiting))
    for case in (case for case in CASES if case.name in options.cases):
        costs = costs_us(case, options.waiting, options.batch, options.steps)
        cells = (f"{cost:10.0f} ({cost / costs[0]:4.2f}x)" for cost in costs)
        print(f"{case.name:16}" + "".join(f"{cell:>18}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
