"""No job starves: the bound of docs/scheduling.md, on random loads.

Let A = alpha under `return`, 2 alpha under `reset` (the second alpha is the time Q1 is given to help). A job that
waits has a ticket at the first step at which it has waited for A, tickets are served before all queues in the order
they were handed out, and each plan serves the first of them unless the pipeline is draining for it. So between two
tokens of a job, and from its arrival to its first token, there lies no more than

    A  +  (T * U + L + 3) * (P + 1) * I

with U the tokens a ticket is good for, alpha the longest that the backlog made of it, T the most tickets out at once,
L = ceil(most jobs becoming due at once / 64) further steps of the rescue, P the stages and I the longest time an
iteration takes through all stages. Prompts run whole.
"""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastserve_scheduler.core import SchedulerCore
from fastserve_scheduler.core.commands import RunIteration
from fastserve_scheduler.core.config import Promotion
from fastserve_scheduler.core.events import Event, JobArrived
from fastserve_scheduler.core.kv.recompute import Recompute
from fastserve_scheduler.core.policies import POLICIES
from fastserve_scheduler.core.rescue import MAX_LIFTS_PER_STEP
from fastserve_scheduler.sim import Simulator

from .support import MS, PROFILE, PerToken, config, mlfq, ready_core


@dataclass
class Watch:
    core: SchedulerCore
    most_tickets: int = 0
    most_jobs: int = 0
    longest_alpha_ns: int = 0
    longest_ns: int = 0
    cost: PerToken = field(default_factory=PerToken)

    def __call__(self, now_ns: int, plan: RunIteration) -> None:
        self.most_tickets = max(self.most_tickets, sum(job.ticket for job in self.core.jobs.values()))
        self.most_jobs = max(self.most_jobs, len(self.core.jobs))
        self.longest_alpha_ns = max(self.longest_alpha_ns, self.core.clock.alpha_ns(""))
        stages = self.core.config.num_stages
        self.longest_ns = max(self.longest_ns, sum(self.cost.stage_ns(plan, stage) for stage in range(stages)))


def longest_gap_and_bound(
    policy: str, promotion: Promotion, stages: int, num_blocks: int, arrivals: list[tuple[int, Event]], alpha_ns: int
) -> tuple[int, int]:
    core = SchedulerCore(
        config(
            num_stages=stages,
            max_model_len=60,
            max_batch_tokens=60,
            policy=policy,
            mlfq=mlfq(alpha_ns=alpha_ns, promotion=promotion),
        ),
        PROFILE,
    )
    cost = PerToken(stages)
    watch = Watch(core, cost=cost)
    result = Simulator(core, cost, check=True, watch=watch).run(arrivals, num_blocks)
    assert all(job.reason is not None for job in result.jobs.values())
    rescue_steps = -(-watch.most_jobs // MAX_LIFTS_PER_STEP)
    turns = watch.most_tickets * core.order.burst_turns + rescue_steps + 3
    bound_ns = watch.longest_alpha_ns * (2 if promotion == "reset" else 1) + turns * (stages + 1) * watch.longest_ns
    return max(job.max_gap_ns for job in result.jobs.values()), bound_ns


job_lists = st.lists(
    st.tuples(st.integers(0, 40), st.sampled_from([1, 8, 30]), st.sampled_from([1, 3, 25])), min_size=1, max_size=14
)


SAME_RESCUE = {"las", "sjf", "edf"}
"""Their tickets are those of `slack`; the random machine runs them all."""


@pytest.mark.parametrize("policy", [n for n, order in POLICIES.items() if order.rescues and n not in SAME_RESCUE])
@settings(max_examples=60, deadline=None)
@given(
    jobs=job_lists,
    promotion=st.sampled_from(["reset", "return"]),
    stages=st.integers(1, 3),
    num_blocks=st.sampled_from([16, 24, 400]),
    alpha_ms=st.sampled_from([50, 300]),
)
def test_no_job_waits_longer_than_the_bound(
    policy: str, jobs: list[tuple[int, int, int]], promotion: Promotion, stages: int, num_blocks: int, alpha_ms: int
) -> None:
    at_ns, arrivals = 0, list[tuple[int, Event]]()
    for job_id, (after_ms, prompt, output) in enumerate(jobs, 1):
        at_ns += after_ms * MS
        arrivals.append((at_ns, JobArrived(job_id, prompt, output)))
    gap_ns, bound_ns = longest_gap_and_bound(policy, promotion, stages, num_blocks, arrivals, alpha_ms * MS)
    assert gap_ns <= bound_ns


@pytest.mark.parametrize("promotion", ["reset", "return"])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_large_job_gets_its_blocks_though_small_ones_keep_the_pipeline_full(
    promotion: Promotion, stages: int
) -> None:
    """Its blocks are never idle all at once unless the pipeline drains for it."""
    arrivals: list[tuple[int, Event]] = [(0, JobArrived(number, 4, 8)) for number in range(2, 8)]
    arrivals += [(1, JobArrived(1, 57, 2))]
    arrivals += [(15 * MS * number, JobArrived(100 + number, 4, 8)) for number in range(120)]
    gap_ns, bound_ns = longest_gap_and_bound("skip-join-mlfq", promotion, stages, 16, arrivals, 300 * MS)
    assert gap_ns <= bound_ns


def test_nobody_enters_past_a_ticket_that_waits_for_blocks() -> None:
    """Under `defer` it waits for jobs to finish; were small ones let in meanwhile, it would wait for ever."""
    arrivals: list[tuple[int, Event]] = [(0, JobArrived(number, 4, 8)) for number in range(2, 8)]
    arrivals += [(1, JobArrived(1, 57, 2))]
    arrivals += [(15 * MS * number, JobArrived(100 + number, 4, 8)) for number in range(120)]
    core = SchedulerCore(
        config(max_model_len=60, max_batch_tokens=60, kv_policy="defer", mlfq=mlfq(alpha_ns=300 * MS)), PROFILE
    )
    result = Simulator(core, PerToken(), check=True).run(arrivals, 16)
    # At most five small jobs are on the device, two run at a time, each takes under 100 ms.
    assert result.jobs[1].first_token_ns < 300 * MS + 3 * 100 * MS + 100 * MS


def test_the_pipeline_drains_for_a_ticket_whose_blocks_are_in_flight() -> None:
    """Two long jobs take turns on two stages, so one of them always holds blocks in flight that the large one needs."""
    core = ready_core(num_stages=2, max_batch_size=1, mlfq=mlfq(alpha_ns=300 * MS))
    arrivals: list[tuple[int, Event]] = [(0, JobArrived(1, 4, 300)), (0, JobArrived(2, 4, 300))]
    arrivals.append((1, JobArrived(3, 780, 2)))
    result = Simulator(core, PerToken(2), check=True).run(arrivals, 200)
    assert result.jobs[3].first_token_ns < (300 + 780 + 5 * 10) * MS


def first_after_the_others(
    stages: int, first_priority: int = 0, policy: str = "fixed-priority", kv_policy: str = "recompute", slots: int = 0
) -> tuple[int, int]:
    """Time to first token of a job that needs nearly all blocks, while two others that came 1.5 s before take turns on
    all stages; and when the first of those is done."""
    core = SchedulerCore(
        config(num_stages=stages, max_batch_size=1, policy=policy, kv_policy=kv_policy, swap_min_batches=0), PROFILE
    )
    arrivals: list[tuple[int, Event]] = [(0, JobArrived(number, 4, 300, priority=5)) for number in (1, 2)]
    arrivals.append((1500 * MS, JobArrived(3, 780, 2, priority=first_priority)))
    jobs = Simulator(core, PerToken(stages), check=True).run(arrivals, 200, host_slots=slots).jobs
    return jobs[3].first_token_ns - jobs[3].arrived_ns, min(jobs[1].latency_ns, jobs[2].latency_ns)


@pytest.mark.parametrize(("kv_policy", "slots"), [("recompute", 0), ("proactive", 1000), ("reactive", 1000)])
def test_the_first_in_the_order_waits_no_longer_on_several_stages_than_on_one(kv_policy: str, slots: int) -> None:
    alone_ns, _ = first_after_the_others(1, kv_policy=kv_policy, slots=slots)
    assert alone_ns < 800 * MS, "it runs at once"
    for stages in (2, 3):
        assert first_after_the_others(stages, kv_policy=kv_policy, slots=slots)[0] <= alone_ns + 10 * MS


@pytest.mark.parametrize("policy", ["fixed-priority", "fcfs"])
def test_nothing_is_drained_for_a_job_that_nobody_in_flight_gives_way_to(policy: str) -> None:
    """The two that run are done as soon as without it: 300 turns through the pipeline, 10 ms each."""
    _, done_ns = first_after_the_others(2, first_priority=5, policy=policy)
    assert done_ns < 3000 * MS


def test_the_pipeline_is_not_drained_twice_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who would give way do not, once they could: one iteration with a plan less in flight is all it costs."""
    monkeypatch.setattr(Recompute, "victims", lambda self, job, shortfall: None if shortfall > 45 else [])
    _, done_ns = first_after_the_others(2)
    _, undrained_ns = first_after_the_others(2, first_priority=5)
    assert undrained_ns < done_ns <= undrained_ns + 10 * MS
