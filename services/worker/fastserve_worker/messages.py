"""What a stage is asked and what it answers, free of wire types and of torch."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from fastserve_worker.sampling.params import DrawParams, TokenDraw

RawBytes = bytes | bytearray | memoryview

#: Bytes of one element, by the names that dtypes have on the wire.
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint32": 4}


class PlanRow(NamedTuple):
    """One job's share of an iteration: tokens [start, start + num_tokens), their KV going through `block_table`.

    Ids are packed little-endian uint32, as on the wire. `token_ids` is empty on every stage but the first.
    `draw` is None where no token is drawn after the row: a prompt chunk that is not the last.
    """

    job_id: int
    start: int
    num_tokens: int
    block_table: bytes
    token_ids: bytes
    draw: DrawParams | None


class SwapDirection(StrEnum):
    """As seen from the device."""

    OUT = "out"
    IN = "in"


@dataclass(frozen=True, slots=True)
class SwapOrder:
    """Copies of one job's blocks: device_blocks[i] to or from host_slots[i]."""

    swap_id: int
    job_id: int
    direction: SwapDirection
    device_blocks: tuple[int, ...]
    host_slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """The whole truth of one iteration. Without rows it is there for its swaps.

    `host_generation`: of the arena that the host slots belong to; 0: not compared.
    """

    seq: int
    epoch: int
    rows: tuple[PlanRow, ...]
    swaps: tuple[SwapOrder, ...] = ()
    host_generation: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


@dataclass(frozen=True, slots=True)
class Activations:
    """Hidden states of one plan, [tokens, hidden] row-major little-endian.

    `compute_ns`: sum over the stages that made them.
    """

    dtype: str
    shape: tuple[int, ...]
    data: RawBytes
    compute_ns: int


@dataclass(frozen=True, slots=True)
class ActivationPart:
    """A piece of one plan's hidden states, from byte `offset` of the whole."""

    seq: int
    epoch: int
    dtype: str
    shape: tuple[int, ...]
    offset: int
    data: bytes
    compute_ns: int


@dataclass(frozen=True, slots=True)
class StageOutput:
    """What one stage made of one plan.

    `hidden` [tokens, hidden] as raw bytes on every stage but the last; `draws`, one per row with `draw`, in plan
    order, on the last. `compute_ns`: this stage alone, device synchronised.
    """

    compute_ns: int
    hidden: RawBytes = b""
    draws: tuple[TokenDraw, ...] = ()


@dataclass(frozen=True, slots=True)
class Computed:
    """A plan's output and when it came about.

    `begin_ns`: by the monotonic clock, after `wait_ns` for copies that the plan needed.
    """

    output: StageOutput
    begin_ns: int
    wait_ns: int


@dataclass(frozen=True, slots=True)
class ProfilePoint:
    """One batch to time: `num_sequences` rows of `new_tokens` after `context_tokens` each."""

    num_sequences: int
    new_tokens: int
    context_tokens: int


@dataclass(frozen=True, slots=True)
class KvShape:
    """What a block of this stage's KV is made of; two arenas fit together only where these agree.

    `pipeline_block_bytes`: of a block over all layers of the model and all heads, wherever they are.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_bytes: int
    pipeline_block_bytes: int


@dataclass(frozen=True, slots=True)
class StageInfo:
    """What a stage is and has. Everything but `stage` is equal on all stages of one pipeline."""

    stage: int
    num_stages: int
    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    fingerprint: str
    #: Of this stage's layers.
    kv_block_bytes: int
    #: With how many ranks share the stage, if several do: what was measured on others does not fit.
    device: str
    dtype: str
    #: Of the activations between stages.
    hidden_size: int
    hidden_dtype: str
    #: Which share of the stage this process holds, and of how many. Rank 0 speaks for all.
    rank: int = 0
    num_ranks: int = 1

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Tokens are drawn here."""
        return self.stage == self.num_stages - 1 and self.rank == 0

    @property
    def sends_on(self) -> bool:
        """Another stage works on what this one computes."""
        return self.stage < self.num_stages - 1 and self.rank == 0

    @property
    def takes_bare_plans(self) -> bool:
        """A plan is all that comes: here are token ids, or hidden states come from rank 0 while it computes."""
        return self.is_first or self.rank > 0

    def activation_bytes(self, num_tokens: int) -> int:
        """Bytes of the hidden states of `num_tokens` tokens."""
        return num_tokens * self.hidden_size * DTYPE_BYTES[self.hidden_dtype]
