"""Slots of the arena: where they are, and that a checksum notices what must not be used."""

import pytest

from fastserve_worker.swap.host_slab import ChecksumError, HostSlab

BLOCK_BYTES = 256


def test_slots_do_not_overlap() -> None:
    slab = HostSlab.private(5, BLOCK_BYTES, checksums=True)
    for index in range(5):
        slab.slot(index)[:] = bytes([index]) * BLOCK_BYTES
        slab.seal(index, job_id=index)
    for index in range(5):
        assert slab.slot(index) == bytes([index]) * BLOCK_BYTES
        slab.verify(index, job_id=index)


@pytest.mark.parametrize("index", [-1, 5])
def test_a_slot_that_is_not_there_is_refused(index: int) -> None:
    with pytest.raises(ValueError, match="is not one of 5"):
        HostSlab.private(5, BLOCK_BYTES).slot(index)


def test_one_changed_bit_is_noticed() -> None:
    slab = HostSlab.private(2, BLOCK_BYTES, checksums=True)
    slab.seal(1, job_id=9)
    slab.slot(1)[BLOCK_BYTES - 1] = 1
    with pytest.raises(ChecksumError, match=r"checksum mismatch in host slot 1: stored .*, found"):
        slab.verify(1, job_id=9)


def test_another_jobs_block_is_noticed() -> None:
    slab = HostSlab.private(1, BLOCK_BYTES, checksums=True)
    slab.seal(0, job_id=9)
    with pytest.raises(ChecksumError, match="it holds a block of job 9"):
        slab.verify(0, job_id=8)
