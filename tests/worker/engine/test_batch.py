"""Rows to packed tokens: positions, slots, sampled rows, and the refusal of rows that cannot be."""

from array import array

import pytest

from fastserve_worker.engine import BatchRow, KvPool, PagedBatch


@pytest.fixture
def pool() -> KvPool:
    return KvPool(num_blocks=10, num_layers=1, num_kv_heads=1, head_dim=8, block_size=4)


def test_packs_prefill_chunks_and_decode_tokens(pool: KvPool) -> None:
    rows = [BatchRow(0, 3, [7], True), BatchRow(6, 1, [2, 9, 4], True), BatchRow(3, 3, [5, 1], False)]
    batch = PagedBatch(rows, pool)
    assert batch.positions.tolist() == [0, 1, 2, 6, 3, 4, 5]
    assert batch.token_blocks.tolist() == [7, 7, 7, 9, 5, 1, 1]
    assert batch.token_offsets.tolist() == [0, 1, 2, 2, 3, 0, 1]
    assert batch.sample_rows.tolist() == [2, 3]
    assert (batch.num_rows, batch.num_tokens, batch.num_sampled) == (3, 7, 2)
    assert (batch.row_begins, batch.q_lens, batch.ctx_lens) == ([0, 3, 4], [3, 1, 3], [3, 7, 6])
    assert batch.host_tables.tolist() == [[7, 0], [2, 9], [5, 1]]
    assert batch.host_row_offsets.tolist() == [0, 3, 4, 7]
    assert batch.blocks_of(1).tolist() == [2, 9]


def test_takes_packed_tables_as_they_come_off_the_wire(pool: KvPool) -> None:
    table = memoryview(array("I", [3, 8, 1]).tobytes())
    assert PagedBatch([BatchRow(4, 2, table, False)], pool).token_blocks.tolist() == [8, 8]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (BatchRow(0, 0, [1], False), "at least one token"),
        (BatchRow(-1, 2, [1], False), "at least one token"),
        (BatchRow(3, 2, [1], False), "needs 2 blocks"),
        (BatchRow(0, 1, [10], False), "outside the pool"),
        (BatchRow(0, 1, [-1], False), "outside the pool"),
    ],
)
def test_refuses_impossible_rows(pool: KvPool, row: BatchRow, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PagedBatch([BatchRow(0, 1, [0], True), row], pool)


def test_refuses_an_empty_batch(pool: KvPool) -> None:
    with pytest.raises(ValueError, match="a batch needs rows"):
        PagedBatch([], pool)
