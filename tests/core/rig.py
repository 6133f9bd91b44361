"""A core wired to the oracle of both tiers, moved on by hand: iterations and copies land when the test says so."""

from fastserve_scheduler.core import SchedulerCore
from fastserve_scheduler.core.commands import Command, RunIteration, SwapDirection
from fastserve_scheduler.core.events import (
    Event,
    HostSlotsGranted,
    HostStoreDown,
    IterationDone,
    JobArrived,
    StageDown,
    StageUp,
)
from fastserve_scheduler.core.kv_state import KvState

from .device import Device
from .support import MS, PROFILE, config, tallies_agree


class Rig:
    def __init__(self, num_blocks: int, num_slots: int, **changes: object) -> None:
        settings = {"kv_policy": "proactive", "swap_min_batches": 0, **changes}
        self.core = SchedulerCore(config(**settings), PROFILE)
        self.device = Device(self.core.config.block_size, self.core.config.num_stages, self.core.config.max_batch_size)
        self.num_blocks, self.num_slots, self.now_ns = num_blocks, num_slots, 0
        self.said: list[Command] = []
        for stage in range(self.core.config.num_stages):
            self.tell(StageUp(stage, num_blocks))
        self.grant()

    def tell(self, event: Event) -> list[Command]:
        if isinstance(event, JobArrived):
            self.device.arrived(event)
        commands = self.core.handle(event, self.now_ns)
        self.said += commands
        self.device.obey(commands)
        self.core.check()
        return commands

    def grant(self) -> None:
        if self.num_slots:
            self.tell(HostSlotsGranted(tuple(range(self.num_slots))))

    def done(self, ms: int = 10) -> list[Command]:
        plan = self.device.flying[0]
        self.now_ns += ms * MS
        event = IterationDone(plan.seq, plan.epoch, ms * MS)
        self.device.lands(event)
        return self.tell(event)

    def land(self, *, ok: bool = True) -> list[Command]:
        """The oldest copy, on one stage."""
        return self.tell(self.device.copied(0, ok=ok, copy_ns=MS))

    def stage_falls(self) -> None:
        self.tell(StageDown(0))
        self.tell(StageUp(0, self.num_blocks))

    def host_falls(self) -> None:
        self.device.host_store_down()
        self.tell(HostStoreDown())

    def state(self, job_id: int) -> KvState:
        return self.core.jobs[job_id].kv

    def swaps(self, direction: SwapDirection) -> list[tuple[int, int]]:
        """(job, blocks) of each swap ordered so far."""
        plans = [command for command in self.said if isinstance(command, RunIteration)]
        return [(op.job_id, len(op.device_blocks)) for p in plans for op in p.swaps if op.direction is direction]

    def until(self, job_id: int, state: KvState) -> "Rig":
        """Go on until the job's KV is in that state; copies land after the iterations they ride with."""
        for _ in range(200):
            if self.state(job_id) is state:
                return self
            self.go_on()
        raise AssertionError(f"job {job_id} is never {state}")

    def go_on(self) -> bool:
        if self.device.flying:
            self.done()
        elif self.device.copies:
            self.land()
        else:
            return False
        return True

    def drain(self, steps: int = 3000) -> None:
        """To the end of all jobs; then both ledgers are empty."""
        for _ in range(steps):
            if self.device.copies:
                self.land()
            elif not self.go_on():
                break
        assert not self.core.jobs
        assert self.core.pool.num_free == self.num_blocks
        assert self.core.tiers.host.num_free == self.core.tiers.host.num_slots
        assert not self.core.tiers.swaps
        assert not self.device.kept
        tallies_agree(self.core)
