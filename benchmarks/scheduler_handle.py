"""Cost of one scheduling step against the number of waiting jobs: it must not grow with it.

For each policy and each number of waiting jobs a core is filled with jobs without KV (a full pool keeps them out),
then the same number of iterations is settled and planned. Reported: median CPU time of `handle(IterationDone)` and the
ratio to the smallest number of the same policy. Compare ratios within one run; absolute times depend on the machine.

    python benchmarks/scheduler_handle.py --waiting 100 10000 100000
"""

import argparse
import gc
import statistics
import time
from dataclasses import dataclass

from fastserve_scheduler.core import CoreConfig, MlfqConfig, Profile, SchedulerCore
from fastserve_scheduler.core.commands import RunIteration
from fastserve_scheduler.core.events import IterationDone, JobArrived, StageUp
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


CASES = [
    *(Case(policy, policy, 10**9 * MS) for policy in POLICIES),
    Case("all starving", "skip-join-mlfq", 1000 * MS),
]
"""Without starvation, where the number of waiting jobs must not matter; and the default policy in its worst hour."""


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
            ),
            PROFILE,
        )
        self._core.handle(StageUp(0, 2 * batch), 0)
        self._now_ns = 0
        self.times_ns: list[int] = []
        for number in range(batch + waiting):
            for command in self._core.handle(JobArrived(number, 8 + number % 90, OUTPUT if number else 1), 0):
                assert isinstance(command, RunIteration)
                self._plan = command

    def step(self) -> None:
        event = IterationDone(self._plan.seq, self._plan.epoch, 10 * MS)
        self._now_ns += 10 * MS
        begin_ns = time.thread_time_ns()
        commands = self._core.handle(event, self._now_ns)
        self.times_ns.append(time.thread_time_ns() - begin_ns)
        (self._plan,) = (command for command in commands if isinstance(command, RunIteration))


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
    options = parser.parse_args()
    print(f"batch {options.batch}, {options.steps} steps; median us per step (ratio to {options.waiting[0]} waiting)")
    print(f"{'':16}" + "".join(f"{waiting:>18}" for waiting in options.waiting))
    for case in CASES:
        costs = costs_us(case, options.waiting, options.batch, options.steps)
        cells = (f"{cost:10.0f} ({cost / costs[0]:4.2f}x)" for cost in costs)
        print(f"{case.name:16}" + "".join(f"{cell:>18}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
