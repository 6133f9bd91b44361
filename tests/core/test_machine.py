"""Anything may happen at any time: no order of events breaks the core, loses a job or produces a wrong token.

Tiny alphabets on purpose: with a handful of blocks and jobs every shortage is met within a few steps.
"""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from fastserve_scheduler.core import CoreConfig, MlfqConfig, Profile, SchedulerCore
from fastserve_scheduler.core.commands import Command
from fastserve_scheduler.core.config import KvRanking
from fastserve_scheduler.core.events import (
    ConfigChanged,
    Event,
    HostSlotsGranted,
    HostStoreDown,
    IterationDone,
    JobAborted,
    JobArrived,
    ProfileUpdated,
    StageDown,
    StageUp,
    SwapDone,
    Woke,
)
from fastserve_scheduler.core.kv import KV_POLICIES
from fastserve_scheduler.core.policies import POLICIES

from .device import Device
from .support import MS, PROFILE, revived, tallies_agree

SLOWER, FASTER = (
    Profile(
        prefill=tuple((tokens, ns * by // 2) for tokens, ns in PROFILE.prefill),
        decode=tuple((batch, context, ns * by // 2) for batch, context, ns in PROFILE.decode),
    )
    for by in (4, 1)
)
BLOCKS = st.sampled_from([6, 6, 6, 5, 7])
RARELY = st.sampled_from([False, False, False, True])

mlfq_configs: st.SearchStrategy[MlfqConfig] = st.builds(
    MlfqConfig,
    num_levels=st.integers(0, 3),
    eta=st.integers(1, 2),
    alpha_ns=st.sampled_from([15 * MS, 60 * MS, 10_000 * MS]),
    promotion=st.sampled_from(["reset", "return"]),
    charge=st.sampled_from(["wall", "share"]),
    after_prefill=st.sampled_from(["stay", "top"]),
    alpha_rounds=st.sampled_from([0, 0, 2]),
    demote_when=st.sampled_from(["used-reaches", "used-exceeds", "next-would-exceed"]),
    overrun=st.sampled_from(["finish", "abort"]),
)


class CoreMachine(RuleBasedStateMachine):
    policy = "skip-join-mlfq"
    kv_policy = "recompute"
    kv_ranking: KvRanking = "order"

    core: SchedulerCore
    device: Device

    @initialize(
        mlfq=mlfq_configs,
        stages=st.integers(1, 3),
        batch=st.integers(1, 3),
        chunk=st.sampled_from([0, 2]),
        swapping=st.fixed_dictionaries(
            {
                "swap_min_batches": st.sampled_from([0, 0, 2]),
                "kv_block_bytes": st.sampled_from([0, 1, 100_000_000]),
                "swap_reserve_min_percent": st.sampled_from([2, 20]),
            }
        ),
        num_slots=st.sampled_from([40, 0, 1, 4]),
        slo=st.fixed_dictionaries(
            {
                "slo_token_ns": st.sampled_from([5 * MS, 40 * MS]),
                "slack_step_ns": st.sampled_from([1, 50 * MS]),
                "probe_tokens": st.integers(1, 3),
            }
        ),
    )
    def begin(
        self,
        mlfq: MlfqConfig,
        stages: int,
        batch: int,
        chunk: int,
        swapping: dict[str, int],
        num_slots: int,
        slo: dict[str, int],
    ) -> None:
        self.config = CoreConfig(
            num_stages=stages,
            block_size=2,
            max_batch_size=batch,
            max_batch_tokens=6,
            max_model_len=12,
            prefill_chunk_tokens=chunk,
            max_waiting_jobs=5,
            max_waiting_tokens=30,
            policy=self.policy,
            mlfq=mlfq,
            service_classes=(("patient", 80 * MS),),
            kv_policy=self.kv_policy,
            kv_ranking=self.kv_ranking,
            swap_reserve_max_percent=40,
            **swapping,
            **slo,
        )
        self.core = SchedulerCore(self.config, PROFILE)
        self.device = Device(block_size=2, num_stages=stages, max_batch_size=batch)
        self.log: list[tuple[int, Event]] = []
        self.said: list[Command] = []
        self.now_ns = 0
        self.ids = 0
        for stage in range(stages):
            self._tell(StageUp(stage, 6))
        self.next_slot = 0
        self.grant(num_slots)

    def _tell(self, event: Event) -> None:
        self.log.append((self.now_ns, event))
        commands = self.core.handle(event, self.now_ns)
        self.said += commands
        self.device.obey(commands)

    @rule(
        prompt=st.integers(1, 9),
        output=st.integers(1, 5),
        had=st.sampled_from([0, 0, 0, 1, 3]),
        priority=st.integers(0, 1),
        service_class=st.sampled_from(["", "patient", "unheard of"]),
        hint=st.sampled_from([0, 1, 4, 900]),
        program=st.sampled_from(["", "agent"]),
    )
    def arrive(
        self, prompt: int, output: int, had: int, priority: int, service_class: str, hint: int, program: str
    ) -> None:
        self.ids += 1
        event = JobArrived(self.ids, prompt, output, had, priority, service_class, output, hint, program)
        self.device.arrived(event)
        self._tell(event)

    @precondition(lambda self: self.device.flying)
    @rule(ms=st.sampled_from([0, 1, 9, 10, 11, 40]), stops=st.integers(0, 7))
    def finish_iteration(self, ms: int, stops: int) -> None:
        plan = self.device.flying[0]
        stopped = tuple(item.job_id for index, item in enumerate(plan.items) if stops >> index & 1 and stops > 3)
        event = IterationDone(plan.seq, plan.epoch, ms * MS, stopped)
        self.now_ns += ms * MS
        self.device.lands(event)
        self._tell(event)

    @precondition(lambda self: self.device.flying or self.device.copies)
    @rule(steps=st.integers(2, 12), ms=st.sampled_from([10, 25]))
    def go_on(self, steps: int, ms: int) -> None:
        """Undisturbed for a while, which is when memory runs short."""
        for _ in range(steps):
            if self.device.flying:
                self.finish_iteration(ms, 0)
            elif self.device.copies:
                self.land_swap(0)

    @rule(job=st.integers(1, 12))
    def abort(self, job: int) -> None:
        self._tell(JobAborted(job))

    @rule(stage=st.integers(0, 2), really=RARELY)
    def stage_down(self, stage: int, really: bool) -> None:
        if really and stage < self.config.num_stages:
            self._tell(StageDown(stage))

    @rule(stage=st.integers(0, 2), num_blocks=BLOCKS)
    def stage_up(self, stage: int, num_blocks: int) -> None:
        if stage < self.config.num_stages:
            self._tell(StageUp(stage, num_blocks))

    @rule(num_slots=st.integers(1, 3))
    def grant(self, num_slots: int) -> None:
        self.next_slot += num_slots
        self._tell(HostSlotsGranted(tuple(range(self.next_slot - num_slots, self.next_slot))))

    @rule(anew=st.integers(0, 6), really=RARELY)
    def host_store_down(self, anew: int, really: bool) -> None:
        """Slot numbers of a new arena start from zero again."""
        if not really:
            return
        self.device.host_store_down()
        self._tell(HostStoreDown())
        self.next_slot = 0
        if anew:
            self.grant(anew)

    @precondition(lambda self: self.device.copies)
    @rule(which=st.integers(0, 9), ok=st.sampled_from([True, True, True, False]), ns=st.sampled_from([0, MS, 90 * MS]))
    def land_copy(self, which: int, ok: bool, ns: int) -> None:
        self._tell(self.device.copied(which % len(self.device.copies), ok=ok, num_bytes=7, copy_ns=ns))

    @precondition(lambda self: self.device.copies)
    @rule(which=st.integers(0, 9))
    def land_swap(self, which: int) -> None:
        """On every stage in turn: more often than one by one would have it."""
        swap_id = self.device.copies[which % len(self.device.copies)].op.swap_id
        while indexes := [i for i, copy in enumerate(self.device.copies) if copy.op.swap_id == swap_id]:
            self._tell(self.device.copied(indexes[0], ok=True, copy_ns=MS))

    @rule(swap_id=st.integers(0, 20), stage=st.integers(0, 2), epoch=st.integers(0, 2))
    def late_copy(self, swap_id: int, stage: int, epoch: int) -> None:
        known = [(copy.op.swap_id, copy.stage, copy.epoch) for copy in self.device.copies]
        if stage < self.config.num_stages and (swap_id, stage, epoch) not in known:
            self._tell(SwapDone(swap_id, stage, epoch, False, 1, 1))

    @rule(seq=st.integers(0, 20), epoch=st.integers(0, 2))
    def late_result(self, seq: int, epoch: int) -> None:
        if (seq, epoch) not in [(plan.seq, plan.epoch) for plan in self.device.flying]:
            self._tell(IterationDone(seq, epoch, MS, (1, 2)))

    @rule(profile=st.sampled_from([PROFILE, SLOWER, FASTER]))
    def new_profile(self, profile: Profile) -> None:
        self._tell(ProfileUpdated(profile))

    @rule(
        policy=st.sampled_from(["", "", "", "skip-join-mlfq", "fcfs", "naive-mlfq", "srpt"]),
        mlfq=mlfq_configs,
        batch=st.integers(1, 3),
        tokens=st.sampled_from([2, 6]),
        chunk=st.sampled_from([0, 2]),
        waiting=st.sampled_from([1, 5]),
    )
    def change_config(self, policy: str, mlfq: MlfqConfig, batch: int, tokens: int, chunk: int, waiting: int) -> None:
        """Empty policy: the one that runs."""
        changed = replace(
            self.core.config,
            policy=policy or self.core.config.policy,
            mlfq=mlfq,
            max_batch_size=batch,
            max_batch_tokens=tokens,
            prefill_chunk_tokens=chunk,
            max_waiting_jobs=waiting,
        )
        self.device.max_batch_size = batch
        self._tell(ConfigChanged(changed))

    @rule(ms=st.integers(1, 100))
    def wait(self, ms: int) -> None:
        self.now_ns += ms * MS
        self._tell(Woke())

    @precondition(lambda self: self.ids)
    @rule(really=RARELY)
    def revive(self, really: bool) -> None:
        """From a checkpoint; the end compares all commands with those of a core that never was in a file."""
        if really:
            self.core = revived(self.core)

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "core"):
            return
        self.core.check()
        assert {job for job, client in self.device.clients.items() if client.finished is None} == set(self.core.jobs)

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        self._drain()
        assert not self.core.jobs, "an accepted job is lost"
        assert self.core.pool.num_free == self.core.pool.num_blocks
        assert self.core.tiers.host.num_free == self.core.tiers.host.num_slots == self.next_slot
        assert not self.device.kept, "the host store keeps KV of jobs that are gone"
        assert all(client.finished is not None for client in self.device.clients.values())
        assert all(client.delivered <= client.limit or client.finished for client in self.device.clients.values())
        tallies_agree(self.core)
        again = SchedulerCore(self.config, PROFILE)
        assert [command for at_ns, event in self.log for command in again.handle(event, at_ns)] == self.said

    def _drain(self) -> None:
        for stage in range(self.config.num_stages):
            self._tell(StageUp(stage, 6))
            self._tell(StageUp(stage, 6))
        for _ in range(2000):
            if self.device.flying:
                self.finish_iteration(10, 0)
            elif self.device.copies:
                self.land_swap(0)
            else:
                return
            self.core.check()
        raise AssertionError("the jobs never end")


PAPERS = ["skip-join-mlfq", "fcfs", "batch-fcfs", "round-robin", "fixed-priority", "naive-mlfq", "srpt"]
KV_CHOICES = [(name, "order") for name in KV_POLICIES] + [("proactive", "enst"), ("reactive", "enst")]
CHOICES = [(policy, *choice) for policy in PAPERS for choice in KV_CHOICES]
CHOICES += [
    (policy, *choice)
    for policy in POLICIES
    if policy not in PAPERS
    for choice in (("recompute", "order"), ("proactive", "enst"))
]
"""Every policy; for those beyond the paper the choices of KV that differ most."""


@pytest.mark.parametrize(("policy", "kv_policy", "kv_ranking"), CHOICES)
def test_no_order_of_events_breaks_the_core(policy: str, kv_policy: str, kv_ranking: str) -> None:
    named = {"policy": policy, "kv_policy": kv_policy, "kv_ranking": kv_ranking}
    machine: Any = type("Machine", (CoreMachine,), named)
    run_state_machine_as_test(machine, settings=settings(max_examples=25, stateful_step_count=30, deadline=None))
