"""Native kernels against plain torch on random shapes, and the promise that batches do not change bits."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fastserve_worker.engine.attention import native, reference
from fastserve_worker.engine.attention.params import AttentionParams
from fastserve_worker.engine.batch import BatchRow, PagedBatch
from fastserve_worker.engine.kv_pool import KvPool
from fastserve_worker.engine.native import NativeKernels, load_kernels

_FEW = settings(max_examples=40, deadline=None)


@pytest.fixture(scope="module")
def kernels() -> NativeKernels:
    loaded = load_kernels()
    if loaded is None:
        pytest.skip("this machine cannot build the kernels")
    return loaded


def _random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@_FEW
@given(
    rows=st.integers(1, 210),
    num_inputs=st.sampled_from([1, 7, 64, 383, 384, 385, 900]),
    num_outputs=st.sampled_from([1, 15, 16, 17, 48, 100]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    extras=st.booleans(),
    num_threads=st.sampled_from([1, 2]),
)
def test_linear_is_float64_up_to_rounding(
    kernels: NativeKernels,
    rows: int,
    num_inputs: int,
    num_outputs: int,
    dtype: torch.dtype,
    extras: bool,
    num_threads: int,
) -> None:
    x, weight = _random(rows, num_inputs, seed=1), _random(num_outputs, num_inputs, seed=2).to(dtype)
    bias = _random(num_outputs, seed=3) if extras else None
    residual = _random(rows, num_outputs, seed=4) if extras else None
    torch.set_num_threads(num_threads)
    ours = kernels.linear(x, kernels.pack(weight, bias), residual)
    torch.set_num_threads(1)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    exact = exact if residual is None else exact + residual
    assert (ours - exact).abs().max() < 2e-6 * (num_inputs**0.5 + 4) * max(1.0, float(exact.abs().max()) ** 0.5)


def test_linear_gives_a_row_the_same_bits_in_every_batch(kernels: NativeKernels) -> None:
    x, weight = _random(200, 900, seed=1), kernels.pack(_random(50, 900, seed=2), None)
    alone = torch.cat([kernels.linear(x[row : row + 1], weight) for row in range(200)])
    for rows in (2, 3, 5, 7, 8, 16, 33, 200):
        assert torch.equal(kernels.linear(x[:rows], weight), alone[:rows])


def test_linear_takes_rows_out_of_a_wider_matrix(kernels: NativeKernels) -> None:
    wide, weight = _random(9, 100, seed=1), _random(20, 40, seed=2)
    ours = kernels.linear(wide[:, 30:70], kernels.pack(weight, None))
    torch.testing.assert_close(ours, wide[:, 30:70] @ weight.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("width", [8, 20, 576])
def test_rms_norm(kernels: NativeKernels, width: int) -> None:
    x, weight = _random(37, width, seed=1), _random(width, seed=2)
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-5), F.rms_norm(x, (width,), weight, 1e-5))


def test_rms_norm_of_heads_leaves_the_rest_of_the_row(kernels: NativeKernels) -> None:
    x, weight = _random(5, 100, seed=1), _random(24, seed=2)
    ours = x.clone()
    kernels.rms_norm_heads_(ours, 2, weight, 1e-6)
    heads = x[:, :48].view(5, 2, 24)
    torch.testing.assert_close(ours[:, :48].view(5, 2, 24), F.rms_norm(heads, (24,), weight, 1e-6))
    assert torch.equal(ours[:, 48:], x[:, 48:])


@pytest.mark.parametrize("rotary_dim", [4, 16, 24])
def test_rotation(kernels: NativeKernels, rotary_dim: int) -> None:
    x, angles = _random(6, 3 * 24 + 5, seed=1), _random(6, rotary_dim // 2, seed=2).repeat(1, 2)
    ours = x.clone()
    kernels.rotate_(ours, 3, 24, angles.cos(), angles.sin())
    heads = x[:, :72].view(6, 3, 24)
    turned, kept = heads[..., :rotary_dim], heads[..., rotary_dim:]
    first, second = turned.chunk(2, -1)
    rotated = turned * angles.cos()[:, None] + torch.cat((-second, first), -1) * angles.sin()[:, None]
    torch.testing.assert_close(ours[:, :72].view(6, 3, 24), torch.cat((rotated, kept), -1))
    assert torch.equal(ours[:, 72:], x[:, 72:])


@pytest.mark.parametrize("width", [8, 19, 1536])
def test_silu_times_up(kernels: NativeKernels, width: int) -> None:
    x = 30 * _random(21, 2 * width, seed=1)
    torch.testing.assert_close(kernels.silu_mul(x), F.silu(x[:, :width]) * x[:, width:])


_ROWS = st.lists(st.tuples(st.integers(0, 70), st.integers(1, 45)), min_size=1, max_size=5)


def _pool(kv_heads: int, head_dim: int, num_blocks: int, garbage: float) -> KvPool:
    pool = KvPool(num_blocks=num_blocks, num_layers=2, num_kv_heads=kv_heads, head_dim=head_dim)
    pool.data.fill_(garbage)
    return pool


@_FEW
@given(
    rows=_ROWS,
    kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 2, 3, 7]),
    head_dim=st.sampled_from([8, 16, 24, 64]),
    window=st.sampled_from([None, 1, 5, 16, 40]),
    softcap=st.sampled_from([None, 2.0]),
    num_threads=st.sampled_from([1, 2]),
)
def test_attention_is_the_reference(
    kernels: NativeKernels,
    rows: list[tuple[int, int]],
    kv_heads: int,
    group: int,
    head_dim: int,
    window: int | None,
    softcap: float | None,
    num_threads: int,
) -> None:
    """Both store K and V and attend; what is in slots beyond a context, even NaN, never shows."""
    ours, theirs = (_pool(kv_heads, head_dim, 50, garbage) for garbage in (float("nan"), 0.0))
    history = _random(2, sum(start for start, _ in rows) + 1, kv_heads, head_dim, seed=1)
    batch_rows, next_block, written = [], 49, 0
    for start, num_tokens in rows:
        num_blocks = -(-(start + num_tokens) // 16)
        table = [next_block - i for i in range(num_blocks)]
        next_block -= num_blocks
        at = torch.arange(start)
        blocks = torch.tensor(table)[at // 16]
        for pool in (ours, theirs):
            pool.write(1, blocks, at % 16, *history[:, written : written + start])
        written += start
        batch_rows.append(BatchRow(start, num_tokens, table, sample=True))
    tokens = sum(num_tokens for _, num_tokens in rows)
    query = 3 * _random(tokens, kv_heads * group, head_dim, seed=2)
    key, value = _random(2, tokens, kv_heads, head_dim, seed=3)
    params = AttentionParams(scale=head_dim**-0.5, window=window, softcap=softcap)

    torch.set_num_threads(num_threads)
    got = native.attend(kernels, query, key, value, 1, PagedBatch(batch_rows, ours), params)
    torch.set_num_threads(1)
    want = reference.attend(query, key, value, 1, PagedBatch(batch_rows, theirs), params)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert torch.equal(ours.data.isnan().logical_not(), theirs.data != 0)
    assert torch.equal(ours.data.nan_to_num(0.0), theirs.data)


@pytest.mark.parametrize("window", [None, 13])
def test_attention_gives_the_same_bits_however_a_prompt_is_cut(kernels: NativeKernels, window: int | None) -> None:
    length, heads, kv_heads, dim = 83, 6, 2, 16
    query, kv = _random(length, heads, dim, seed=1), _random(2, length, kv_heads, dim, seed=2)
    params = AttentionParams(scale=0.25, window=window)
    outputs = []
    for chunk in (length, 1, 7, 16, 33):
        pool, parts = _pool(kv_heads, dim, 8, 0.0), []
        for start in range(0, length, chunk):
            new = slice(start, min(start + chunk, length))
            row = BatchRow(start, new.stop - new.start, [5, 1, 7, 2, 3, 0], sample=False)
            batch = PagedBatch([row], pool)
            parts.append(native.attend(kernels, query[new], kv[0][new], kv[1][new], 0, batch, params))
        outputs.append(torch.cat(parts))
    assert all(torch.equal(output, outputs[0]) for output in outputs)
