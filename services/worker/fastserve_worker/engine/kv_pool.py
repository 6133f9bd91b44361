"""Paged KV memory of one stage, block-major: a block holds its tokens' K and V of all layers in one contiguous piece.

So moving a block to the host and back is one copy per block, whatever the number of layers. Inside a block:

    [layer][K][kv_head][head_dim][block_size]     keys transposed: a kernel scores 16 tokens per step without shuffles
    [layer][V][kv_head][block_size][head_dim]
"""

from collections.abc import Sequence

import torch

from fastserve_worker.engine.shape import ModelShape

DEFAULT_BLOCK_SIZE = 16


class KvPool:
    """A bounded pool of blocks. It keeps bytes; who owns which block is decided elsewhere.

    The memory starts as zeros: a masked-out slot still takes part in a product, and 0 x NaN is NaN.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int = DEFAULT_BLOCK_SIZE,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        if min(num_blocks, num_layers, num_kv_heads, head_dim, block_size) < 1:
            raise ValueError("every extent of a KV pool must be at least 1")
        self.num_blocks = num_blocks
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.block_size = block_size
        self.dtype = dtype
        self.device = device or torch.device("cpu")
        shape = (num_blocks, num_layers, 2, num_kv_heads, head_dim * block_size)
        self.data = torch.zeros(shape, dtype=dtype, device=self.device)
        extents = (num_blocks, num_layers, num_kv_heads)
        self._keys: torch.Tensor = self.data[:, :, 0].view(*extents, head_dim, block_size)
        self._values: torch.Tensor = self.data[:, :, 1].view(*extents, block_size, head_dim)
        self._address, self._layer_bytes = self.data.data_ptr(), self.data.stride(1) * dtype.itemsize
        self._bytes = self.data.view(num_blocks, -1).view(torch.uint8)

    @classmethod
    def for_model(
        cls, shape: ModelShape, *, num_blocks: int, device: torch.device, block_size: int = DEFAULT_BLOCK_SIZE
    ) -> "KvPool":
        """A pool for the layers of one stage."""
        return cls(
            num_blocks=num_blocks,
            num_layers=shape.num_stage_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_size=block_size,
            dtype=shape.dtype,
            device=device,
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers of the stage."""
        return self._bytes.shape[1]

    def keys(self, layer: int) -> torch.Tensor:
        """[num_blocks, kv_heads, head_dim, block_size], a view."""
        return self._keys[:, layer]

    def values(self, layer: int) -> torch.Tensor:
        """[num_blocks, kv_heads, block_size, head_dim], a view."""
        return self._values[:, layer]

    def layer_address(self, layer: int) -> int:
        """Memory address of a layer's keys in block 0."""
        return self._address + layer * self._layer_bytes

    def write(
        self, layer: int, blocks: torch.Tensor, offsets: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Put K and V of new tokens, each [tokens, kv_heads, head_dim], into (block, offset) of `layer`."""
        self._keys[:, layer][blocks, :, :, offsets] = key.to(self.dtype)
        self._values[:, layer][blocks, :, offsets] = value.to(self.dtype)

    def gather(self, layer: int, blocks: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the first `length` tokens of a block table, each [kv_heads, length, head_dim], copied."""
        key = self._keys[:, layer][blocks].permute(1, 0, 3, 2)
        value = self._values[:, layer][blocks].permute(1, 0, 2, 3)
        return key.flatten(1, 2)[:, :length], value.flatten(1, 2)[:, :length]

    def block_view(self, block: int) -> torch.Tensor:
        """The bytes of one block, uint8 [block_bytes]: a view, for copying to and from host memory."""
        return self._bytes[block]

    def blocks_out(self, ids: Sequence[int]) -> torch.Tensor:
        """A copy of the bytes of some blocks, uint8 [len(ids), block_bytes], on the pool's device."""
        return self._bytes.index_select(0, self._index(ids))

    def blocks_in(self, ids: Sequence[int], contents: torch.Tensor) -> None:
        """Overwrite blocks with bytes that `blocks_out` gave, from this or another pool of the same layout."""
        if contents.shape != (len(ids), self.block_bytes):
            raise ValueError(f"expected {len(ids)} blocks of {self.block_bytes} bytes, got {tuple(contents.shape)}")
        self._bytes.index_copy_(0, self._index(ids), contents.to(self.device))

    def _index(self, ids: Sequence[int]) -> torch.Tensor:
        if any(not 0 <= block < self.num_blocks for block in ids):
            raise ValueError(f"block id outside the pool of {self.num_blocks} blocks")
        return torch.tensor(list(ids), dtype=torch.int64, device=self.device)
