"""An oracle of what device and host hold, on every stage: which position of which job each place was last written with.

Stages carry plans out in the order they were sent, so writing at the moment of sending is the same thing. Copies land
when the test says so, on each stage by itself, and read and write at that moment: a block or slot that was used again
before its copy had landed on every stage shows as a wrong value. A plan that reads a position nobody wrote, or
somebody else's, would have produced a wrong token on a real engine.
"""

from dataclasses import dataclass, field

from fastserve_scheduler.core.commands import (
    Command,
    FinishJob,
    FinishReason,
    FreeHost,
    KeepHost,
    RaiseEpoch,
    RejectJob,
    RunIteration,
    SwapDirection,
    SwapOp,
)
from fastserve_scheduler.core.events import IterationDone, JobArrived, SwapDone

Value = tuple[int, int]
"""(job, position)."""

JUNK: Value = (-1, -1)


@dataclass
class Client:
    """What one accepted job was promised and has got."""

    limit: int
    delivered: int
    finished: FinishReason | None = None


@dataclass
class Copy:
    """One stage's part of a swap that has not landed."""

    op: SwapOp
    stage: int
    epoch: int
    generation: int


@dataclass
class Device:
    block_size: int
    num_stages: int
    max_batch_size: int
    epoch: int = 0
    #: Of the host arena.
    generation: int = 0
    memory: list[dict[tuple[int, int], Value]] = field(default_factory=list)
    arena: list[dict[tuple[int, int], Value]] = field(default_factory=list)
    flying: list[RunIteration] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    #: Slots the host store keeps, and for whom.
    kept: dict[int, int] = field(default_factory=dict)
    clients: dict[int, Client] = field(default_factory=dict)
    prompts: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.memory = [{} for _ in range(self.num_stages)]
        self.arena = [{} for _ in range(self.num_stages)]

    def arrived(self, event: JobArrived) -> None:
        self.clients[event.job_id] = Client(event.max_output_tokens, event.output_tokens)
        self.prompts[event.job_id] = event.prompt_tokens

    def lands(self, event: IterationDone) -> None:
        """The oldest plan's tokens go out. Call before the core hears of it."""
        plan = self.flying.pop(0)
        assert (plan.seq, plan.epoch) == (event.seq, event.epoch)
        for item in plan.items:
            client = self.clients[item.job_id]
            if item.sample:
                assert item.output_position == client.delivered, "a token twice, or one missing"
                client.delivered += 1

    def copied(self, index: int, *, ok: bool, num_bytes: int = 1, copy_ns: int = 1) -> SwapDone:
        """One copy lands, whole or broken; what to tell the core."""
        copy = self.copies.pop(index)
        current = copy.generation == self.generation
        memory, arena = self.memory[copy.stage], self.arena[copy.stage]
        for block, slot in zip(copy.op.device_blocks, copy.op.host_slots, strict=True):
            for offset in range(self.block_size):
                if copy.op.direction is SwapDirection.IN:
                    memory[block, offset] = arena.get((slot, offset), JUNK) if ok and current else JUNK
                elif current:
                    arena[slot, offset] = memory.get((block, offset), JUNK) if ok else JUNK
        return SwapDone(copy.op.swap_id, copy.stage, copy.epoch, ok, num_bytes, copy_ns)

    def host_store_down(self) -> None:
        self.generation += 1
        self.arena = [{} for _ in range(self.num_stages)]
        self.kept.clear()

    def obey(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case RunIteration():
                    self._execute(command)
                case RaiseEpoch(epoch):
                    self._raise(epoch)
                case FinishJob(job_id, reason):
                    client = self.clients[job_id]
                    assert client.finished is None, "finished twice"
                    assert all(item.job_id != job_id for plan in self.flying for item in plan.items)
                    client.finished = reason
                case RejectJob(job_id):
                    del self.clients[job_id]
                case KeepHost(job_id, slots):
                    assert not any(copy.op.host_slots == slots for copy in self._current()), "kept before it landed"
                    assert not self.kept.keys() & set(slots), "kept twice"
                    self.kept.update(dict.fromkeys(slots, job_id))
                case FreeHost(job_id, slots):
                    assert all(self.kept.pop(slot) == job_id for slot in slots), "freed what was not kept"

    def _current(self) -> list[Copy]:
        return [copy for copy in self.copies if copy.generation == self.generation]

    def _raise(self, epoch: int) -> None:
        assert epoch == self.epoch + 1
        self.epoch = epoch
        for index in reversed(range(len(self.copies))):
            self.copied(index, ok=False)  # what it had written by then is anybody's guess
        self.memory = [{} for _ in range(self.num_stages)]
        self.flying.clear()

    def _execute(self, plan: RunIteration) -> None:
        assert plan.epoch == self.epoch
        assert len(plan.items) <= self.max_batch_size
        assert plan.items or plan.swaps, "an empty plan"
        self.flying.append(plan)
        assert len(self.flying) <= self.num_stages
        jobs = [item.job_id for flying in self.flying for item in flying.items]
        assert len(jobs) == len(set(jobs)), "in two batches at once"
        for op in plan.swaps:
            self._order(op)
        moving = {block for copy in self.copies for block in copy.op.device_blocks}
        blocks = [block for flying in self.flying for item in flying.items for block in item.block_table]
        assert len(blocks) == len(set(blocks)), "a block of a job in flight was given away"
        assert not moving & set(blocks), "a block of a job in flight is being copied"
        for item in plan.items:
            client = self.clients[item.job_id]
            assert client.finished is None
            known = self.prompts[item.job_id] + client.delivered
            end = item.start + item.num_tokens
            assert end <= known, "computes a token nobody knows"
            assert not item.sample or end == known, "draws before the last known token"
            for memory in self.memory:
                for position in range(item.start):
                    assert memory[self._place(item.block_table, position)] == (item.job_id, position), "KV of another"
                for position in range(item.start, end):
                    memory[self._place(item.block_table, position)] = (item.job_id, position)

    def _order(self, op: SwapOp) -> None:
        assert len(op.device_blocks) == len(op.host_slots) > 0
        assert self.clients[op.job_id].finished is None
        blocks, slots = set(op.device_blocks), set(op.host_slots)
        assert len(blocks) == len(op.device_blocks)
        assert len(slots) == len(op.host_slots)
        for copy in self.copies:
            assert not blocks & set(copy.op.device_blocks), "a block of two copies at once"
        for copy in self._current():
            assert not slots & set(copy.op.host_slots), "a slot of two copies at once"
        if op.direction is SwapDirection.OUT:
            assert not slots & self.kept.keys(), "writes to a slot that is kept"
        else:
            assert all(self.kept[slot] == op.job_id for slot in slots), "reads what is not its own"
        self.copies += [Copy(op, stage, self.epoch, self.generation) for stage in range(self.num_stages)]

    def _place(self, table: tuple[int, ...], position: int) -> tuple[int, int]:
        return table[position // self.block_size], position % self.block_size
