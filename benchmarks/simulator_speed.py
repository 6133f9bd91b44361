"""How fast the simulator is, and what bounds it: iterations per second of one replica on one core.

Many jobs that do not end arrive at once; when each has had its prompt computed, decode iterations are timed. Then the
same events are given to a core without a simulator around it: what it needs for them is the core's share, and the rest
is the simulator's own, heap, cost model, recorder and all. Processor time, with the collector off.

    python benchmarks/simulator_speed.py
    make compiled && PYTHONPATH=build/compiled python benchmarks/simulator_speed.py
"""

import argparse
import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fastserve_scheduler.compiled import COMPILED
from fastserve_scheduler.core.commands import Command
from fastserve_scheduler.core.config import CoreConfig
from fastserve_scheduler.core.events import Event, IterationDone
from fastserve_scheduler.core.scheduler import SchedulerCore
from fastserve_scheduler.sim.arrivals import Request
from fastserve_scheduler.sim.cost import OPT_13B_A100
from fastserve_scheduler.sim.fleet import Fleet, Plant

GOAL = 100_000
"""Iterations per second that were aimed at."""

BOUND = """An iteration is one call of the core, which takes every job of the batch out of its order and puts it back.
`core us` is that call alone: no simulator around it can be faster. The two are timed one after the
other: on a busy machine the core's share may exceed 100 %."""

MODEL_LEN = 1 << 16
PROMPT = 16
WARM_ITERATIONS = 64


@dataclass(frozen=True)
class Case:
    policy: str
    batch: int
    waiting: int
    iterations: int


@dataclass(slots=True)
class Clock:
    """Notes the processor time when the warm-up is over and when enough iterations have run."""

    warm: int
    last: int
    events: list[tuple[int, Event]]
    seen: int = 0
    begin_s: float = 0.0
    end_s: float = 0.0

    def __call__(self, now_ns: int, event: Event, commands: Sequence[Command]) -> None:
        self.events.append((now_ns, event))
        if type(event) is IterationDone:
            self.seen += 1
            if self.seen == self.warm:
                self.begin_s = time.process_time()
            elif self.seen == self.last:
                self.end_s = time.process_time()


def plant(case: Case) -> Plant:
    jobs = case.waiting + case.batch
    config = CoreConfig(
        num_stages=1,
        block_size=16,
        max_batch_size=case.batch,
        max_batch_tokens=max(4096, PROMPT * case.batch),
        max_model_len=MODEL_LEN,
        max_waiting_jobs=jobs,
        max_waiting_tokens=max(MODEL_LEN, jobs * PROMPT),
        policy=case.policy,
    )
    blocks = jobs * (2 + case.iterations // 16) + MODEL_LEN // 16
    return Plant(config, OPT_13B_A100.profile(MODEL_LEN, case.batch), OPT_13B_A100, blocks)


def requests(case: Case) -> Iterator[Request]:
    return (Request(0, PROMPT, MODEL_LEN // 2) for _ in range(case.waiting + case.batch))


def measure(case: Case) -> tuple[float, float]:
    """Microseconds per iteration: of the whole simulation, and of the core alone."""
    system = plant(case)
    # Without a look at the log FCFS would never run those behind: it needs no prompts of theirs.
    prompts = 0 if case.policy == "fcfs" else case.waiting // case.batch
    warm = WARM_ITERATIONS + prompts
    clock = Clock(warm, warm + case.iterations, [])
    fleet = Fleet(system, log=clock)
    until_ns = round((warm + case.iterations + 16) * 4 * 20_000_000 * max(1, case.batch / 16))
    gc.disable()
    try:
        fleet.run(requests(case), until_ns=until_ns)
        if not clock.end_s:
            raise SystemExit(f"only {clock.seen} iterations ran")
        alone_s = replayed_s(system, clock)
    finally:
        gc.enable()
    return (clock.end_s - clock.begin_s) / case.iterations * 1e6, alone_s / case.iterations * 1e6


def replayed_s(system: Plant, clock: Clock) -> float:
    """Processor time of a fresh core for the timed events."""
    core = SchedulerCore(system.config, system.profile)
    seen, begin_s = 0, 0.0
    for now_ns, event in clock.events:
        core.handle(event, now_ns)
        if type(event) is IterationDone:
            seen += 1
            if seen == clock.warm:
                begin_s = time.process_time()
            elif seen == clock.last:
                return time.process_time() - begin_s
    raise SystemExit("the log is cut short")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=["skip-join-mlfq", "fcfs"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 128])
    parser.add_argument("--waiting", type=int, nargs="+", default=[10, 10_000])
    parser.add_argument("--job-steps", type=int, default=48_000, help="iterations x batch of each case")
    options = parser.parse_args()
    print(f"core: {'compiled to C' if COMPILED else 'Python'}\n")
    print(f"{'policy':16}{'batch':>6}{'waiting':>9}{'it/s':>9}{'us/it':>8}{'core us':>9}{'core':>7}{'us/job step':>13}")
    best = 0.0
    for policy in options.policies:
        for batch in options.batch:
            for waiting in options.waiting:
                case = Case(policy, batch, waiting, max(200, min(4000, options.job_steps // batch)))
                whole_us, core_us = measure(case)
                best = max(best, 1e6 / whole_us)
                print(
                    f"{policy:16}{batch:6}{waiting:9}{1e6 / whole_us:9.0f}{whole_us:8.1f}{core_us:9.1f}"
                    f"{core_us / whole_us:7.0%}{whole_us / batch:13.1f}",
                    flush=True,
                )
    if best < GOAL:
        print(f"\nBelow {GOAL:,} iterations/s.\n{BOUND}")


if __name__ == "__main__":
    main()
