"""All stages of a pipeline in one process, without a scheduler: for tests, benchmarks and checking a model folder.

Greedy. The caller says who runs in each step, so every preemption can be tried at every position.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fastserve_worker.engine.batch import BatchRow, PagedBatch
from fastserve_worker.engine.kv_pool import DEFAULT_BLOCK_SIZE, KvPool
from fastserve_worker.engine.stage_model import StageModel


@dataclass(slots=True, eq=False)
class OfflineSequence:
    """One request: its ids, how many of them have KV, and where that KV is."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    #: Bytes of its blocks on every stage while it is swapped out.
    host_copies: list[torch.Tensor] | None = None

    @property
    def output(self) -> list[int]:
        """Ids generated so far."""
        return self.token_ids[len(self.prompt) :]

    @property
    def done(self) -> bool:
        """Whether it has all its tokens."""
        return len(self.output) >= self.max_new_tokens


class OfflinePipeline:
    """Stages wired by function calls, each with its own pool; one block table per sequence serves all of them."""

    def __init__(
        self,
        stages: Sequence[StageModel],
        *,
        num_blocks: int,
        device: torch.device,
        block_size: int = DEFAULT_BLOCK_SIZE,
        chunk_tokens: int | None = None,
    ) -> None:
        """`chunk_tokens`: most tokens of one sequence in one step; None: a prompt runs whole."""
        self.stages = list(stages)
        self.pools = [
            KvPool.for_model(stage.config, num_blocks=num_blocks, device=device, block_size=block_size)
            for stage in stages
        ]
        self._device = device
        self._block_size = block_size
        self._chunk_tokens = chunk_tokens
        self._free = list(range(num_blocks))

    @classmethod
    def load(
        cls,
        model_dir: Path,
        *,
        num_stages: int = 1,
        num_blocks: int = 256,
        dtype: torch.dtype = torch.float32,
        linear: str = "auto",
        block_size: int = DEFAULT_BLOCK_SIZE,
        chunk_tokens: int | None = None,
    ) -> "OfflinePipeline":
        """All stages of a model folder, on the CPU."""
        device = torch.device("cpu")
        stages = [
            StageModel.load(model_dir, stage=stage, num_stages=num_stages, dtype=dtype, device=device, linear=linear)
            for stage in range(num_stages)
        ]
        return cls(stages, num_blocks=num_blocks, device=device, block_size=block_size, chunk_tokens=chunk_tokens)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence owns."""
        return len(self._free)

    def add(self, prompt: Sequence[int], max_new_tokens: int) -> OfflineSequence:
        """A new sequence; it runs when it is passed to `step`."""
        return OfflineSequence(tuple(prompt), max_new_tokens, list(prompt))

    def step(self, sequences: Sequence[OfflineSequence]) -> torch.Tensor:
        """Run one iteration of these sequences. Returns logits of those that got a token, in order."""
        rows: list[BatchRow] = []
        ids: list[int] = []
        sampled: list[OfflineSequence] = []
        for sequence in sequences:
            todo = sequence.token_ids[sequence.num_computed :][: self._chunk_tokens]
            start = sequence.num_computed
            sequence.num_computed += len(todo)
            self._grow(sequence)
            sample = sequence.num_computed == len(sequence.token_ids)
            rows.append(BatchRow(start, len(todo), sequence.blocks, sample))
            ids += todo
            if sample:
                sampled.append(sequence)
        hidden = torch.tensor(ids, device=self._device)
        for stage, pool in zip(self.stages, self.pools, strict=True):
            hidden = stage.forward(hidden, PagedBatch(rows, pool))
        for sequence, token in zip(sampled, hidden.argmax(-1).tolist(), strict=True):
            sequence.token_ids.append(token)
            if sequence.done:
                self._release(sequence)
        return hidden

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: Sequence[int]) -> list[list[int]]:
        """Run all prompts together to their ends, each leaving the batch when it is done."""
        sequences = [self.add(prompt, count) for prompt, count in zip(prompts, max_new_tokens, strict=True)]
        running = list(sequences)
        while running:
            self.step(running)
            running = [sequence for sequence in running if not sequence.done]
        return [sequence.output for sequence in sequences]

    def preempt_by_recompute(self, sequence: OfflineSequence) -> None:
        """Drop its KV: it will be prefilled again from prompt and generated ids."""
        self._release(sequence)
        sequence.num_computed = 0

    def swap_out(self, sequence: OfflineSequence) -> None:
        """Move its KV to host copies and give its blocks back."""
        sequence.host_copies = [pool.blocks_out(sequence.blocks) for pool in self.pools]
        self._release(sequence)

    def swap_in(self, sequence: OfflineSequence) -> None:
        """Move its KV back, into other blocks than it had."""
        if sequence.host_copies is None:
            raise ValueError("the sequence is not swapped out")
        sequence.blocks = [self._free.pop(0) for _ in range(sequence.host_copies[0].shape[0])]
        for pool, contents in zip(self.pools, sequence.host_copies, strict=True):
            pool.blocks_in(sequence.blocks, contents)
        sequence.host_copies = None

    def _grow(self, sequence: OfflineSequence) -> None:
        missing = -(-sequence.num_computed // self._block_size) - len(sequence.blocks)
        if missing > len(self._free):
            raise MemoryError(f"{missing} more blocks are needed, {len(self._free)} are free")
        sequence.blocks += [self._free.pop(0) for _ in range(missing)]

    def _release(self, sequence: OfflineSequence) -> None:
        self._free += sequence.blocks  # at the far end, so that a swapped sequence returns to other blocks
        sequence.blocks = []
