"""An oracle of what the stages hold: which position of which job each block slot was last written with.

Stages carry plans out in the order they were sent, so writing at the moment of sending is the same thing. A plan that
reads a position nobody wrote, or somebody else's, would have produced a wrong token on a real engine.
"""

from dataclasses import dataclass, field

from fastserve_scheduler.core.commands import Command, FinishJob, FinishReason, RaiseEpoch, RejectJob, RunIteration
from fastserve_scheduler.core.events import IterationDone, JobArrived


@dataclass
class Client:
    """What one accepted job was promised and has got."""

    limit: int
    delivered: int
    finished: FinishReason | None = None


@dataclass
class Device:
    block_size: int
    num_stages: int
    max_batch_size: int
    epoch: int = 0
    slots: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    flying: list[RunIteration] = field(default_factory=list)
    clients: dict[int, Client] = field(default_factory=dict)
    prompts: dict[int, int] = field(default_factory=dict)

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

    def obey(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case RunIteration():
                    self._execute(command)
                case RaiseEpoch(epoch):
                    assert epoch == self.epoch + 1
                    self.epoch = epoch
                    self.slots.clear()
                    self.flying.clear()
                case FinishJob(job_id, reason):
                    client = self.clients[job_id]
                    assert client.finished is None, "finished twice"
                    assert all(item.job_id != job_id for plan in self.flying for item in plan.items)
                    client.finished = reason
                case RejectJob(job_id):
                    del self.clients[job_id]

    def _execute(self, plan: RunIteration) -> None:
        assert plan.epoch == self.epoch
        assert 0 < len(plan.items) <= self.max_batch_size
        self.flying.append(plan)
        assert len(self.flying) <= self.num_stages
        jobs = [item.job_id for flying in self.flying for item in flying.items]
        assert len(jobs) == len(set(jobs)), "in two batches at once"
        blocks = [block for flying in self.flying for item in flying.items for block in item.block_table]
        assert len(blocks) == len(set(blocks)), "a block of a job in flight was given away"
        for item in plan.items:
            client = self.clients[item.job_id]
            assert client.finished is None
            known = self.prompts[item.job_id] + client.delivered
            end = item.start + item.num_tokens
            assert end <= known, "computes a token nobody knows"
            assert not item.sample or end == known, "draws before the last known token"
            for position in range(item.start):
                assert self.slots[self._slot(item.block_table, position)] == (item.job_id, position), "KV of another"
            for position in range(item.start, end):
                self.slots[self._slot(item.block_table, position)] = (item.job_id, position)

    def _slot(self, table: tuple[int, ...], position: int) -> tuple[int, int]:
        return table[position // self.block_size], position % self.block_size
