"""Figure 7: three jobs of two iterations that arrive together and run one at a time, under four policies.

The paper prints the four averages and not the times of the iterations. Two sets of times give its averages: A exactly,
B nearly, with the queues and the finishing order that its text describes, by its rule "demote by the next iteration".
"""

import sys
from dataclasses import dataclass, replace

from fastserve_scheduler.core import CoreConfig, MlfqConfig, Profile, SchedulerCore
from fastserve_scheduler.core.commands import RunIteration
from fastserve_scheduler.core.config import DemoteWhen
from fastserve_scheduler.core.events import Event, JobArrived
from fastserve_scheduler.sim.simulator import simulate

from .figure import Figure, Options, Report, Table, main
from .points import Store
from .style import LABELS

UNIT_NS = 1_000_000_000
PAPER = {"fcfs": 4.23, "naive-mlfq": 5.0, "skip-join-mlfq": 3.3, "srpt": 3.0}
OPENER = 9
"""A job that runs while the three arrive makes them arrive together."""


@dataclass(frozen=True, slots=True)
class Times:
    """First iterations of J1, J2, J3 and the second one of each, in tenths of the figure's unit."""

    first: tuple[int, int, int]
    second: int
    rule: DemoteWhen

    def stage_ns(self, plan: RunIteration, stage: int) -> int:
        (item,) = plan.items
        return UNIT_NS // 10 * (item.num_tokens if item.start == 0 else self.second)


SETS = {"A": Times((30, 2, 21), 2, "used-exceeds"), "B": Times((25, 3, 10), 6, "next-would-exceed")}


@dataclass(frozen=True, slots=True)
class Played:
    """Average completion in the figure's unit, jobs in the order in which they finish, and the queue each joined."""

    average: float
    order: list[int]
    joined: list[int]


def play(times: Times, policy: str) -> Played:
    profile = Profile(prefill=((1, UNIT_NS // 10), (100, 10 * UNIT_NS)), decode=((1, 1, times.second * UNIT_NS // 10),))
    mlfq = replace(MlfqConfig(), demote_when=times.rule)
    core = SchedulerCore(CoreConfig(1, 16, 1, 1000, 1000, policy=policy, mlfq=mlfq), profile)
    arrivals: list[tuple[int, Event]] = [(0, JobArrived(OPENER, 1, 1))]
    arrivals += [(0, JobArrived(job, times.first[job - 1], 2, oracle_output_tokens=2)) for job in (1, 2, 3)]
    result = simulate(core, arrivals, times, num_blocks=100)
    start_ns = result.jobs.pop(OPENER).finished_ns
    whole_ns = sum(job.finished_ns - start_ns for job in result.jobs.values())
    joined = [core.story(job)[0].detail + 1 for job in (1, 2, 3)]
    return Played(whole_ns / 3 / UNIT_NS, [job.job_id for job in result.finished()], joined)


def report(options: Options, store: Store) -> Report:
    rows, values = [], {}
    for policy, theirs in PAPER.items():
        played = {name: play(times, policy) for name, times in SETS.items()}
        label = LABELS.get(policy, "skip-join MLFQ")
        averages = [f"{each.average:.3f}" for each in played.values()]
        orders = [" ".join(f"J{job}" for job in each.order) for each in played.values()]
        rows.append([label, f"{theirs:g}", *averages, *orders])
        values[policy] = {name: {"average": each.average, "order": each.order} for name, each in played.items()}
    header = ["", "paper", "set A", "set B", "finish, A", "finish, B"]
    joined = {name: play(times, "skip-join-mlfq").joined for name, times in SETS.items()}
    return Report(
        [Table("Average completion time of three jobs", header, rows)], {"averages": values, "joined": joined}
    )


FIGURE = Figure("fig07", report)

if __name__ == "__main__":
    sys.exit(main(FIGURE))
