"""The pool keeps bytes: zero at birth, the same after a round trip, whichever blocks they come back to."""

import pytest
import torch

from fastserve_worker.engine import KvPool, ModelShape


def _pool(dtype: torch.dtype = torch.float32) -> KvPool:
    return KvPool(num_blocks=7, num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype=dtype)


def test_starts_as_zeros() -> None:
    assert not _pool().data.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_return_byte_identical_to_other_places(dtype: torch.dtype) -> None:
    pool, other = _pool(dtype), _pool(dtype)
    pool.data.view(torch.uint8).random_(0, 256, generator=torch.Generator().manual_seed(1))
    before = pool.data.clone().view(torch.uint8)
    copies = pool.blocks_out([5, 0, 3])
    assert copies.shape == (3, pool.block_bytes)
    pool.data.zero_()
    pool.blocks_in([1, 6, 2], copies)
    other.blocks_in([4, 2, 0], copies)
    for source, target, elsewhere in zip([5, 0, 3], [1, 6, 2], [4, 2, 0], strict=True):
        assert torch.equal(pool.data.view(torch.uint8)[target], before[source])
        assert torch.equal(other.block_view(elsewhere), before[source].flatten())
    assert not pool.block_view(5).any()


def test_a_block_view_is_the_memory_itself() -> None:
    pool = _pool()
    pool.block_view(2).fill_(255)
    assert pool.data[2].isnan().all()
    assert not pool.data[1].any()


def test_written_tokens_are_gathered_in_the_order_of_the_table() -> None:
    pool = _pool()
    key, value = torch.randn(2, 6, 2, 8).unbind(0)
    table = torch.tensor([4, 1])
    at = torch.arange(6)
    pool.write(1, table[at // 4], at % 4, key, value)
    got_key, got_value = pool.gather(1, table, 6)
    assert torch.equal(got_key, key.transpose(0, 1))
    assert torch.equal(got_value, value.transpose(0, 1))
    assert not pool.data[:, 0].any()
    assert not pool.data[:, 2].any()


def test_refuses_what_does_not_fit() -> None:
    pool = _pool()
    with pytest.raises(ValueError, match="outside the pool"):
        pool.blocks_out([7])
    with pytest.raises(ValueError, match="expected 2 blocks"):
        pool.blocks_in([1, 2], pool.blocks_out([1]))
    with pytest.raises(ValueError, match="at least 1"):
        KvPool(num_blocks=0, num_layers=1, num_kv_heads=1, head_dim=8)


def test_block_bytes_are_those_the_shape_announces() -> None:
    shape = ModelShape(
        model_type="llama",
        num_layers=9,
        first_layer=4,
        last_layer=8,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=100,
        max_position_embeddings=64,
        dtype=torch.bfloat16,
        fingerprint="",
    )
    pool = KvPool.for_model(shape, num_blocks=3, device=torch.device("cpu"), block_size=16)
    assert pool.block_bytes == shape.kv_block_bytes(16) == 5 * 2 * 2 * 16 * 16 * 2
