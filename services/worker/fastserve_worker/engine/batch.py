"""One iteration's ragged batch: which tokens of which sequences run, and where their K and V live.

Everything a layer needs is computed here once per iteration, not once per layer.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fastserve_worker.engine.attention.params import AttentionParams
from fastserve_worker.engine.kv_pool import KvPool
from fastserve_worker.engine.native.kernels import BatchStruct

BlockTable = Sequence[int] | memoryview


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One sequence's part of an iteration: tokens [start, start + num_tokens), decode when num_tokens is 1."""

    start: int
    num_tokens: int
    #: Blocks of the sequence in order; may be longer than needed. A memoryview holds little-endian uint32.
    block_table: BlockTable
    #: Whether the last of these tokens gets logits.
    sample: bool


class PagedBatch:
    """Rows packed one after another: token t of the packed batch is at `positions[t]` of its sequence."""

    def __init__(self, rows: Sequence[BatchRow], pool: KvPool) -> None:
        """Raises ValueError for an empty batch or row, a table too short for its row, a block outside the pool."""
        starts = np.array([row.start for row in rows], dtype=np.int64)
        q_lens = np.array([row.num_tokens for row in rows], dtype=np.int64)
        if q_lens.size == 0 or q_lens.min() < 1 or starts.min() < 0:
            raise ValueError("a batch needs rows, and each row at least one token at a position of at least 0")
        ctx_lens = starts + q_lens
        tables = _pack_tables(rows, ctx_lens, pool)

        row_ends = np.cumsum(q_lens)
        row_begins = row_ends - q_lens
        row_of_token = np.repeat(np.arange(len(rows)), q_lens)
        positions = np.arange(row_ends[-1]) + (starts - row_begins)[row_of_token]
        token_blocks = tables[row_of_token, positions // pool.block_size].astype(np.int64)
        sampled = np.array([row.sample for row in rows], dtype=bool)

        self.pool = pool
        self.num_rows = len(rows)
        self.num_tokens = int(row_ends[-1])
        #: Python ints for loops over rows: first token of each row in the packed batch, new tokens, context with them.
        self.row_begins: list[int] = row_begins.tolist()
        self.q_lens: list[int] = q_lens.tolist()
        self.ctx_lens: list[int] = ctx_lens.tolist()
        #: int32 arrays for kernels: tables [rows, max_blocks] (unused entries 0), offsets of rows [rows + 1], contexts.
        self.host_tables = tables
        self.host_row_offsets = np.concatenate(([0], row_ends)).astype(np.int32)
        self.host_ctx_lens = ctx_lens.astype(np.int32)
        #: int64 [tokens]: position in the sequence, and the block and offset where the token's K and V go.
        self.positions = torch.from_numpy(positions).to(pool.device)
        self.token_blocks = torch.from_numpy(token_blocks).to(pool.device)
        self.token_offsets = torch.from_numpy(positions % pool.block_size).to(pool.device)
        #: int64 [num_sampled]: packed index of each row's last token, rows with sample=True only, in row order.
        self.sample_rows = torch.from_numpy((row_ends - 1)[sampled]).to(pool.device)
        self.struct = BatchStruct(
            *(self.num_tokens, self.num_rows, tables.shape[1], pool.data.stride(0)),
            *(array.ctypes.data for array in (tables, self.host_row_offsets, self.host_ctx_lens)),
        )
        self.struct_address = ctypes.addressof(self.struct)
        #: Told what each layer's attention does with its scores; for finding that out before a layer is replaced.
        self.on_attention: Callable[[AttentionParams], None] | None = None
        self._device_tables: torch.Tensor | None = None

    @property
    def num_sampled(self) -> int:
        """Rows that get logits."""
        return self.sample_rows.shape[0]

    def blocks_of(self, row: int) -> torch.Tensor:
        """int64 block ids that hold the context of `row`, on the pool's device."""
        if self._device_tables is None:
            self._device_tables = torch.from_numpy(self.host_tables).to(self.pool.device, torch.int64)
        return self._device_tables[row, : -(-self.ctx_lens[row] // self.pool.block_size)]


def _pack_tables(rows: Sequence[BatchRow], ctx_lens: npt.NDArray[np.int64], pool: KvPool) -> npt.NDArray[np.int32]:
    """Block tables cut to what each row's context needs, padded to one width."""
    needed = -(-ctx_lens // pool.block_size)
    tables = np.zeros((len(rows), int(needed.max())), dtype=np.int32)
    for index, (row, num_blocks) in enumerate(zip(rows, needed.tolist(), strict=True)):
        table = _as_array(row.block_table)
        if table.size < num_blocks:
            raise ValueError(
                f"row {index} needs {num_blocks} blocks for {int(ctx_lens[index])} tokens, has {table.size}"
            )
        tables[index, :num_blocks] = table[:num_blocks]
    if tables.min() < 0 or tables.max() >= pool.num_blocks:
        raise ValueError(f"block id outside the pool of {pool.num_blocks} blocks")
    return tables


def _as_array(table: BlockTable) -> npt.NDArray[np.int64]:
    if isinstance(table, memoryview):
        return np.frombuffer(table, dtype="<u4").astype(np.int64)
    return np.asarray(table, dtype=np.int64)
