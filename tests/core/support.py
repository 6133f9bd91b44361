"""What the core's tests share: a tiny machine whose times are easy to count, and short ways to say things."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fastserve_scheduler.core import CoreConfig, MlfqConfig, Profile, SchedulerCore
from fastserve_scheduler.core.checkpoint import decode, encode
from fastserve_scheduler.core.commands import Command, FinishJob, FinishReason, RunIteration, SwapDirection
from fastserve_scheduler.core.events import Event, IterationDone, StageUp
from fastserve_scheduler.core.residency import StayEnd

MS = 1_000_000

PROFILE = Profile(
    prefill=((1, MS), (1000, 1000 * MS)),
    decode=((1, 1, 10 * MS), (64, 1, 10 * MS)),
)
"""A prompt takes 1 ms per token, a decode iteration 10 ms whatever its batch: quanta are 10, 20, 40, 80 ... ms."""


@dataclass(frozen=True, slots=True)
class PerToken:
    """Iteration time of the tiny machine, split evenly over the stages."""

    num_stages: int = 1

    def stage_ns(self, plan: RunIteration, stage: int) -> int:
        prompt = sum(item.num_tokens for item in plan.items if item.num_tokens > 1 or item.start == 0)
        decodes = any(item.num_tokens == 1 and item.start > 0 for item in plan.items)
        return max(prompt * MS, 10 * MS if decodes else 0) // self.num_stages


def config(**changes: object) -> CoreConfig:
    """The paper's policy, unless another one is asked for."""
    base = CoreConfig(
        num_stages=1,
        block_size=4,
        max_batch_size=2,
        max_batch_tokens=1000,
        max_model_len=1000,
        policy="skip-join-mlfq",
    )
    return replace(base, **changes)  # type: ignore[arg-type]  # field names checked by the dataclass itself


def mlfq(**changes: object) -> MlfqConfig:
    return replace(MlfqConfig(), **changes)  # type: ignore[arg-type]  # as above


def ready_core(num_blocks: int = 1000, profile: Profile = PROFILE, **changes: object) -> SchedulerCore:
    core = SchedulerCore(config(**changes), profile)
    for stage in range(core.config.num_stages):
        assert core.handle(StageUp(stage, num_blocks), 0) == []
    return core


def plans(commands: Sequence[Command]) -> list[RunIteration]:
    return [command for command in commands if isinstance(command, RunIteration)]


def ran(commands: Sequence[Command]) -> list[list[int]]:
    """Job ids of each plan."""
    return [[item.job_id for item in plan.items] for plan in plans(commands)]


def finished(commands: Sequence[Command]) -> list[tuple[int, FinishReason]]:
    return [(command.job_id, command.reason) for command in commands if isinstance(command, FinishJob)]


def tallies_agree(core: SchedulerCore) -> None:
    """What an idle core's histograms have to do with each other, and with what it counts otherwise."""
    assert not core.jobs
    snapshot = core.snapshot()
    times, swap = snapshot.times, snapshot.swap
    assert times.queue.count == snapshot.finished == snapshot.accepted
    assert times.decode.count <= times.prefill.count == times.inference.count == times.prefill_tokens.count
    assert times.prefill.total + times.decode.total == times.inference.total
    for direction, num_swaps, num_bytes in (
        (SwapDirection.OUT, swap.swaps_out, swap.bytes_out),
        (SwapDirection.IN, swap.swaps_in, swap.bytes_in),
    ):
        assert (swap.sizes[direction].count, swap.sizes[direction].total) == (num_swaps, num_bytes)
    device = swap.residency.device
    assert swap.residency.idle_before_evict.count == device[StayEnd.MOVED].count + device[StayEnd.DROPPED].count
    assert swap.residency.idle_before_evict.total <= device[StayEnd.MOVED].total + device[StayEnd.DROPPED].total
    assert swap.residency.reuse_gap.count <= swap.residency.host[StayEnd.MOVED].count


def revived(core: SchedulerCore) -> SchedulerCore:
    """The core after a way through a file."""
    written = json.dumps(encode(core))
    again = decode(json.loads(written), core.config, core.predictor.profile)
    assert json.dumps(encode(again)) == written
    return again


class Hand:
    """Plays the pipeline by hand: remembers what is in flight, answers the oldest plan when told to."""

    def __init__(self, core: SchedulerCore) -> None:
        self.core = core
        self.now_ns = 0
        self.flying: list[RunIteration] = []

    def tell(self, event: Event, at_ns: int | None = None) -> list[Command]:
        self.now_ns = self.now_ns if at_ns is None else at_ns
        commands = self.core.handle(event, self.now_ns)
        self.flying += plans(commands)
        self.core.check()
        return commands

    def done(self, compute_ns: int = 10 * MS, stopped: tuple[int, ...] = ()) -> list[Command]:
        plan = self.flying.pop(0)
        return self.tell(IterationDone(plan.seq, plan.epoch, compute_ns, stopped), self.now_ns + compute_ns)
