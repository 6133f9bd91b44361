"""The live side adds nothing to what the core decides: the same script, simulated and live, is the same journal."""

import random
from array import array
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fastserve_scheduler.core.config import CoreConfig, MlfqConfig
from fastserve_scheduler.core.events import Event, IterationDone, JobAborted, JobArrived, StageUp
from fastserve_scheduler.core.scheduler import SchedulerCore
from fastserve_scheduler.flights import Flights
from fastserve_scheduler.gateway_link import GatewayLink
from fastserve_scheduler.journal import JournalWriter
from fastserve_scheduler.journal_codec import encode_commands
from fastserve_scheduler.journal_reader import read_entries
from fastserve_scheduler.messages import Cancel, CancelReason, Ready, Report, Sampling, Submit, WirePlan
from fastserve_scheduler.metrics import Metrics
from fastserve_scheduler.runner import Runner
from fastserve_scheduler.sessions import Sessions
from fastserve_scheduler.sim.cost import OPT_13B_A100
from fastserve_scheduler.sim.simulator import Simulator
from fastserve_scheduler.swap_watch import SwapWatch

STOP_ID, OTHER_ID = 7, 8
NUM_BLOCKS = 40
NS_PER_S = 1_000_000_000


@dataclass
class RecordingStages:
    """Stages that note what they are sent."""

    plans: list[WirePlan] = field(default_factory=list)

    def begin_round(self) -> None:
        raise AssertionError("no stage is lost in this script")

    def send_plan(self, plan: WirePlan) -> None:
        self.plans.append(plan)


def _script(rng: random.Random, num_jobs: int) -> list[tuple[int, Event]]:
    """Arrivals over some seconds; one in five gives up later, some of them after their end."""
    script: list[tuple[int, Event]] = []
    at_ns = 0
    for job_id in range(1, num_jobs + 1):
        at_ns += rng.randrange(NS_PER_S // 4)
        script.append((at_ns, JobArrived(job_id, rng.randrange(1, 200), rng.randrange(1, 120))))
        if rng.random() < 0.2:
            script.append((at_ns + rng.randrange(4 * NS_PER_S), JobAborted(job_id)))
    return script


def _config(policy: str, num_stages: int) -> CoreConfig:
    return CoreConfig(
        num_stages=num_stages,
        block_size=16,
        max_batch_size=4,
        max_batch_tokens=256,
        max_model_len=512,
        prefill_chunk_tokens=64,
        max_waiting_jobs=12,
        policy=policy,
        mlfq=MlfqConfig(alpha_ns=400_000_000),
    )


def _ready(stage: int, num_stages: int, num_blocks: int) -> Ready:
    return Ready(1, stage, num_stages, num_blocks, 16, 512, 1000, "model", 1024, "cpu", "float32")


def _play_live(journal: Path, core: SchedulerCore, events: list[tuple[int, Event]], stops: dict[int, int]) -> None:
    """Say to the live runner, at the simulated times, what gateways and stages would say."""
    now_ns = 0
    stages, link = RecordingStages(), GatewayLink("gw", limit=1 << 20)
    writer = JournalWriter(journal, core.config, core.predictor.profile)
    runner = Runner(
        core=core,
        sessions=Sessions(),
        flights=Flights(core.config.num_stages, max_faults=3),
        swaps=SwapWatch(core.config.num_stages),
        stages=stages,
        clock_ns=lambda: now_ns,
        wake_at=lambda at_ns: None,
        metrics=Metrics(),
        journal=writer,
        check=True,
    )
    last_stage = core.config.num_stages - 1
    for at_ns, event in events:
        now_ns = at_ns
        match event:
            case StageUp(stage, num_blocks):
                if stage == last_stage:
                    ready = [
                        Ready(1, i, last_stage + 1, num_blocks, 16, 512, 9, "m", 1, "cpu", "f")
                        for i in range(stage + 1)
                    ]
                    runner.joined(1, ready)
            case JobArrived(job_id, prompt_tokens, max_output_tokens):
                prompt = array("I", [1]) * prompt_tokens
                stop_ids = frozenset((STOP_ID,))
                submit = Submit(str(job_id), prompt, array("I"), Sampling(), max_output_tokens, stop_ids=stop_ids)
                runner.submit(submit, link)
            case JobAborted(job_id):
                runner.cancel(Cancel(str(job_id), CancelReason.CLIENT), link)
            case IterationDone(seq, _, compute_ns):
                plan = stages.plans[seq]
                ids = [
                    STOP_ID if item.output_position + 1 == stops.get(item.job_id) else OTHER_ID
                    for item in plan.items
                    if item.sample
                ]
                runner.report(Report(plan.seq, 1, last_stage, compute_ns, compute_ns, array("I", ids)))
            case _:
                raise AssertionError(f"not in the script: {event}")
    writer.close()


@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize("policy", ["skip-join-mlfq", "fcfs", "naive-mlfq"])
def test_simulated_and_live_decisions_are_the_same(tmp_path: Path, policy: str, num_stages: int) -> None:
    rng = random.Random(f"{policy} {num_stages}")
    config, profile = _config(policy, num_stages), OPT_13B_A100.profile(512, 4)
    stops = {job_id: rng.randrange(1, 100) for job_id in range(1, 81, 2)}
    simulator = Simulator(SchedulerCore(config, profile), OPT_13B_A100, stops, keep_log=True)
    simulated = simulator.run(_script(rng, 80), NUM_BLOCKS)
    _play_live(tmp_path / "journal", SchedulerCore(config, profile), simulated.events, stops)
    live = list(read_entries(tmp_path / "journal"))
    assert [encoded for entry in live for encoded in entry.commands] == encode_commands(simulated.commands)
    # An abort of a job that is over stops at the sessions; the core would ignore it.
    assert [(e.now_ns, e.event) for e in live if not isinstance(e.event, JobAborted)] == [
        (at_ns, event) for at_ns, event in simulated.events if not isinstance(event, JobAborted)
    ]
    counters = simulator.core.counters
    assert counters.finished > 20
    assert counters.rejected > 0
    assert sum(counters.preemptions.values()) > 0 or policy == "fcfs"
