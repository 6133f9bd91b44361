"""Long random runs with memory always short: whatever lands when, no token is wrong and nothing is lost.

The state machine of test_machine.py finds short counterexamples but seldom gets two jobs as far as a swap; here
arrivals keep the pool full, so that each run swaps hundreds of times while stages and the host store fall.
"""

import random
from dataclasses import dataclass

import pytest

from fastserve_scheduler.core import CoreConfig, MlfqConfig, SchedulerCore
from fastserve_scheduler.core.checkpoint import encode
from fastserve_scheduler.core.commands import Command, SwapDirection
from fastserve_scheduler.core.config import KvRanking
from fastserve_scheduler.core.events import (
    Event,
    HostSlotsGranted,
    HostStoreDown,
    IterationDone,
    JobAborted,
    JobArrived,
    StageDown,
    StageUp,
)
from fastserve_scheduler.core.policies import POLICIES

from .device import Device
from .support import MS, PROFILE, revived

STEPS = 800


@dataclass
class Chaos:
    """One run. `falls`: how often per thousand steps a stage or the host store falls or a copy fails."""

    seed: int
    policy: str
    kv_policy: str
    kv_ranking: KvRanking
    num_blocks: int
    num_slots: int
    falls: int = 8

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.config = CoreConfig(
            num_stages=self.random.choice([1, 1, 2, 3]),
            block_size=self.random.choice([1, 2, 4]),
            max_batch_size=self.random.choice([1, 2, 3]),
            max_batch_tokens=16,
            max_model_len=self.num_blocks,
            prefill_chunk_tokens=self.random.choice([0, 0, 3]),
            max_waiting_jobs=12,
            max_waiting_tokens=400,
            policy=self.policy,
            mlfq=MlfqConfig(
                eta=self.random.choice([1, 1, 2]),
                alpha_ns=self.random.choice([60, 300, 10_000]) * MS,
                promotion=self.random.choice(["reset", "return"]),
            ),
            kv_policy=self.kv_policy,
            kv_ranking=self.kv_ranking,
            swap_min_batches=self.random.choice([0, 0, 2]),
            swap_reserve_max_percent=20,
        )
        self.core = SchedulerCore(self.config, PROFILE)
        self.device = Device(self.config.block_size, self.config.num_stages, self.config.max_batch_size)
        self.now_ns = 0
        self.num_jobs = 0
        self.log: list[tuple[int, Event]] = []
        self.said: list[Command] = []

    def tell(self, event: Event) -> None:
        self.log.append((self.now_ns, event))
        commands = self.core.handle(event, self.now_ns)
        self.said += commands
        self.device.obey(commands)
        self.core.check()

    def grant(self) -> None:
        if self.num_slots:
            self.tell(HostSlotsGranted(tuple(range(self.num_slots))))

    def stages_up(self) -> None:
        for stage in range(self.config.num_stages):
            self.tell(StageUp(stage, self.num_blocks))

    def run(self) -> None:
        self.stages_up()
        self.grant()
        for _ in range(STEPS):
            self.step()
        for stage in range(self.config.num_stages):
            self.tell(StageUp(stage, self.num_blocks))
        self.drain()

    def step(self) -> None:
        kind = self.random.randrange(1000)
        if kind < self.falls:
            self.fall()
        elif kind < 30:
            self.tell(JobAborted(self.random.randint(max(1, self.num_jobs - 12), self.num_jobs + 1)))
        elif kind < 250:
            self.arrive()
        elif kind < 650 and self.device.flying:
            self.iterate(self.random.choice([1, 10, 10, 10, 30]))
        elif self.device.copies:
            index = self.random.randrange(len(self.device.copies))
            ok = self.random.randrange(1000) >= self.falls * 2
            self.tell(self.device.copied(index, ok=ok, num_bytes=5, copy_ns=self.random.choice([1, MS, 20 * MS])))

    def fall(self) -> None:
        if self.random.random() < 0.5:
            self.device.host_store_down()
            self.tell(HostStoreDown())
            self.grant()
        else:
            stage = self.random.randrange(self.config.num_stages)
            self.tell(StageDown(stage))
            self.tell(StageUp(stage, self.num_blocks))

    def arrive(self) -> None:
        self.num_jobs += 1
        prompt = self.random.randint(1, self.num_blocks // 2)
        output = self.random.randint(1, self.num_blocks // 2)
        event = JobArrived(self.num_jobs, prompt, output, priority=self.random.randint(0, 3))
        self.device.arrived(event)
        self.tell(event)

    def iterate(self, ms: int) -> None:
        plan = self.device.flying[0]
        stopped = tuple(item.job_id for item in plan.items if self.random.random() < 0.05)
        self.now_ns += ms * MS
        event = IterationDone(plan.seq, plan.epoch, ms * MS, stopped)
        self.device.lands(event)
        self.tell(event)

    def drain(self) -> None:
        for _ in range(20_000):
            if self.device.copies:
                self.tell(self.device.copied(0, ok=True))
            elif self.device.flying:
                self.iterate(10)
            else:
                break
        assert not self.core.jobs, "an accepted job is lost, or they never end"
        assert self.core.pool.num_free == self.core.pool.num_blocks
        assert self.core.tiers.host.num_free == self.core.tiers.host.num_slots == self.num_slots
        assert not self.device.kept
        assert all(client.finished is not None for client in self.device.clients.values())


def _num_blocks(seed: int) -> int:
    return (8, 12, 24)[seed % 3]


@pytest.mark.parametrize("kv_ranking", ["order", "enst"])
@pytest.mark.parametrize("kv_policy", ["proactive", "reactive", "blocking"])
def test_every_value_is_right_on_either_tier_whatever_happens(kv_policy: str, kv_ranking: KvRanking) -> None:
    swapped = dict.fromkeys(SwapDirection, 0)
    failed = reused = 0
    for seed in range(15):
        chaos = Chaos(seed, "skip-join-mlfq", kv_policy, kv_ranking, _num_blocks(seed), (1000, 6, 1)[seed % 3])
        chaos.run()
        counters = chaos.core.tiers.counters
        for direction in SwapDirection:
            swapped[direction] += counters.swaps[direction]
        failed += counters.failed
        reused += counters.clean_blocks_reused
    assert swapped[SwapDirection.OUT] > 250
    assert swapped[SwapDirection.IN] > 150
    assert failed > 5, "failed copies were not met"
    assert reused > 20, "clean copies were not met"


@pytest.mark.parametrize("kv_policy", ["proactive", "reactive", "blocking"])
@pytest.mark.parametrize("policy", list(POLICIES))
def test_any_order_may_swap(policy: str, kv_policy: str) -> None:
    for seed in range(3):
        Chaos(100 + seed, policy, kv_policy, "enst", _num_blocks(seed), (1000, 4)[seed % 2]).run()


@pytest.mark.parametrize("kv_policy", ["proactive", "reactive", "blocking"])
def test_the_same_events_give_the_same_swaps(kv_policy: str) -> None:
    chaos = Chaos(7, "skip-join-mlfq", kv_policy, "enst", 12, 40)
    chaos.run()
    again = SchedulerCore(chaos.config, PROFILE)
    assert [command for at_ns, event in chaos.log for command in again.handle(event, at_ns)] == chaos.said


@pytest.mark.parametrize("policy", list(POLICIES))
def test_a_core_out_of_a_file_goes_on_as_if_nothing_had_happened(policy: str) -> None:
    chaos = Chaos(11, policy, "proactive", "enst", 12, 40)
    chaos.run()
    again = SchedulerCore(chaos.config, PROFILE)
    commands = []
    for number, (at_ns, event) in enumerate(chaos.log):
        if number % 100 == 99:
            again = revived(again)
        commands += again.handle(event, at_ns)
    again.check()
    assert commands == chaos.said
    assert encode(again) == encode(chaos.core)
    assert again.snapshot() == chaos.core.snapshot()
    job_id = chaos.num_jobs // 2
    assert again.story(job_id) == chaos.core.story(job_id) != ()


@pytest.mark.parametrize("kv_policy", ["proactive", "reactive", "blocking"])
def test_without_host_slots_it_is_recompute(kv_policy: str) -> None:
    for seed in range(3):
        swapping = Chaos(seed, "skip-join-mlfq", kv_policy, "order", 12, 0)
        swapping.run()
        recomputing = SchedulerCore(Chaos(seed, "skip-join-mlfq", "recompute", "order", 12, 0).config, PROFILE)
        commands = [command for at_ns, event in swapping.log for command in recomputing.handle(event, at_ns)]
        assert commands == swapping.said
