"""This stage's piece of the host arena: slots of equal size in memory that other processes may map too."""

import zlib
from dataclasses import dataclass
from struct import Struct

#: Behind every slot's block when checksums are on. More than a checksum needs: blocks stay aligned to cache lines.
TRAILER_BYTES = 64

_SEAL = Struct("<QI")


class ChecksumError(Exception):
    """A slot does not hold what was stored in it, or holds another job's block."""


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class HostSlab:
    """`memory`: num_slots x slot_bytes, writable. The mapping lives as long as anything refers to it.

    A slot is a block of KV, followed by a trailer when slot_bytes says so. `generation` tells this arena from any
    before and after it on `node`.
    """

    memory: memoryview
    num_slots: int
    slot_bytes: int
    block_bytes: int
    generation: int
    node: str

    @classmethod
    def private(
        cls, num_slots: int, block_bytes: int, *, generation: int = 1, node: str = "", checksums: bool = False
    ) -> "HostSlab":
        """Memory of this process alone, for tests and for fake stages."""
        slot_bytes = block_bytes + (TRAILER_BYTES if checksums else 0)
        memory = memoryview(bytearray(num_slots * slot_bytes))
        return cls(memory, num_slots, slot_bytes, block_bytes, generation, node)

    @property
    def has_trailers(self) -> bool:
        return self.slot_bytes > self.block_bytes

    def slot(self, index: int) -> memoryview:
        """The block's bytes, a view. Raises ValueError for a slot that is not there."""
        if not 0 <= index < self.num_slots:
            raise ValueError(f"host slot {index} is not one of {self.num_slots}")
        begin = index * self.slot_bytes
        return self.memory[begin : begin + self.block_bytes]

    def seal(self, index: int, job_id: int) -> None:
        """Store the checksum of what the slot holds now, in shared memory: it outlives this process, as the KV does."""
        _SEAL.pack_into(self.memory, index * self.slot_bytes + self.block_bytes, job_id, zlib.crc32(self.slot(index)))

    def verify(self, index: int, job_id: int) -> None:
        """Raises ChecksumError unless the slot holds, unchanged, a block that this job stored."""
        owner, stored = _SEAL.unpack_from(self.memory, index * self.slot_bytes + self.block_bytes)
        found = zlib.crc32(self.slot(index))
        if owner != job_id:
            raise ChecksumError(f"checksum mismatch in host slot {index}: it holds a block of job {owner}")
        if found != stored:
            raise ChecksumError(f"checksum mismatch in host slot {index}: stored {stored:08x}, found {found:08x}")
