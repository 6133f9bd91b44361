"""The ledger of device blocks: the only place where a block becomes owned or free.

Block ids mean the same position in every stage's pool, so the pool is as large as the smallest stage's.
"""

from dataclasses import dataclass


class BlockError(Exception):
    """The ledger was asked for something impossible: a defect of the caller, never load."""


@dataclass(slots=True)
class BlockTable:
    """The blocks of one job, in position order. Owns them from `BlockPool.grow` to `BlockPool.release`."""

    block_ids: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.block_ids)


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens each."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.num_blocks = 0
        self._free: list[int] = []
        self._owned: list[bool] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def missing(self, table: BlockTable, num_tokens: int) -> int:
        """Blocks the table lacks to hold `num_tokens`."""
        count = -(-num_tokens // self.block_size) - len(table.block_ids)
        return count if count > 0 else 0

    def grow(self, table: BlockTable, num_tokens: int) -> None:
        """Let the table hold `num_tokens`. Raises BlockError when the free blocks do not suffice."""
        count = self.missing(table, num_tokens)
        if count > len(self._free):
            raise BlockError(f"{count} blocks asked, {len(self._free)} free")
        taken = tuple(self._free.pop() for _ in range(count))
        for block_id in taken:
            self._owned[block_id] = True
        table.block_ids += taken

    def release(self, table: BlockTable) -> int:
        """Free all blocks of the table and empty it; how many they were. Raises BlockError on a block not owned."""
        count = len(table)
        for block_id in reversed(table.block_ids):
            if not self._owned[block_id]:
                raise BlockError(f"block {block_id} released twice")
            self._owned[block_id] = False
            self._free.append(block_id)
        table.block_ids = ()
        return count

    def keep(self, table: BlockTable, start: int, stop: int) -> None:
        """Free the table's blocks outside start .. stop-1. Raises BlockError on a block not owned."""
        ids = table.block_ids
        self.release(BlockTable(ids[:start] + ids[stop:]))
        table.block_ids = ids[start:stop]

    def resize(self, num_blocks: int) -> None:
        """A new pool of another size. Raises BlockError while a block is owned."""
        if len(self._free) != self.num_blocks:
            raise BlockError(f"{self.num_blocks - len(self._free)} blocks are owned")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._owned = [False] * num_blocks

    def free_ids(self) -> tuple[int, ...]:
        return tuple(self._free)
