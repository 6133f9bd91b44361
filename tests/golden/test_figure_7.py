"""Figure 7 of the paper by simulation: three jobs of two iterations each, arriving together, run one at a time.

The figure's times are not printed; two sets of them reproduce its four averages. Set A is exact. Set B also has the
queues and the finishing order that the text describes, and needs its rule "demotes by the next iteration time".
"""

from dataclasses import dataclass, replace

import pytest

from fastserve_scheduler.core import CoreConfig, MlfqConfig, Profile, SchedulerCore
from fastserve_scheduler.core.commands import RunIteration
from fastserve_scheduler.core.config import DemoteWhen
from fastserve_scheduler.core.events import Event, JobArrived
from fastserve_scheduler.sim import simulate

TENTH_NS = 100_000_000
OPENER = 9


@dataclass(frozen=True)
class Times:
    """First iteration of J1, J2, J3 and the second one of each, in tenths of the figure's unit."""

    first: tuple[int, int, int]
    second: int
    rule: DemoteWhen

    def stage_ns(self, plan: RunIteration, stage: int) -> int:
        (item,) = plan.items
        return TENTH_NS * (item.num_tokens if item.start == 0 else self.second)


SET_A = Times((30, 2, 21), 2, "used-exceeds")
SET_B = Times((25, 3, 10), 6, "next-would-exceed")


def run(times: Times, policy: str) -> tuple[float, list[int], list[int]]:
    """Average completion time in units, finishing order, and the level each job joined."""
    profile = Profile(
        prefill=((1, TENTH_NS), (100, 100 * TENTH_NS)),
        decode=((1, 1, times.second * TENTH_NS),),
    )
    mlfq = replace(MlfqConfig(), demote_when=times.rule)
    core = SchedulerCore(CoreConfig(1, 16, 1, 1000, 1000, policy=policy, mlfq=mlfq), profile)
    # A job that runs while the three arrive makes them arrive together.
    arrivals: list[tuple[int, Event]] = [(0, JobArrived(OPENER, 1, 1))]
    arrivals += [(0, JobArrived(job, times.first[job - 1], 2, oracle_output_tokens=2)) for job in (1, 2, 3)]
    result = simulate(core, arrivals, times, num_blocks=100)
    start_ns = result.jobs.pop(OPENER).finished_ns
    joined = [core.story(job)[0].detail + 1 for job in (1, 2, 3)]
    average = sum(job.finished_ns - start_ns for job in result.jobs.values()) / 3 / (10 * TENTH_NS)
    return round(average, 3), [job.job_id for job in result.finished()], joined


@pytest.mark.parametrize(
    ("policy", "average", "order"),
    [
        ("fcfs", 4.233, [1, 2, 3]),
        ("naive-mlfq", 5.0, [2, 1, 3]),
        ("skip-join-mlfq", 3.3, [2, 1, 3]),
        ("srpt", 3.0, [2, 3, 1]),
    ],
)
def test_set_a(policy: str, average: float, order: list[int]) -> None:
    assert run(SET_A, policy)[:2] == (average, order)


@pytest.mark.parametrize(
    ("policy", "average", "order"),
    [
        ("fcfs", 4.233, [1, 2, 3]),
        ("naive-mlfq", 5.0, [1, 2, 3]),
        ("skip-join-mlfq", 3.333, [2, 3, 1]),
        ("srpt", 3.0, [2, 3, 1]),
    ],
)
def test_set_b(policy: str, average: float, order: list[int]) -> None:
    assert run(SET_B, policy)[:2] == (average, order)


def test_the_queues_joined() -> None:
    assert run(SET_A, "skip-join-mlfq")[2] == [5, 1, 5]
    assert run(SET_B, "skip-join-mlfq")[2] == [4, 1, 2]
    assert run(SET_B, "naive-mlfq")[2] == [1, 1, 1]


@pytest.mark.parametrize("times", [SET_A, SET_B])
def test_naive_mlfq_is_worse_than_fcfs_and_skip_join_better(times: Times) -> None:
    fcfs, naive, skip_join = (run(times, policy)[0] for policy in ("fcfs", "naive-mlfq", "skip-join-mlfq"))
    assert skip_join < fcfs < naive
