"""Blocks of a KV pool as bytes, on the CPU and on CUDA devices."""

import contextlib
import logging
import weakref
from collections.abc import Iterator

import numpy as np
import torch

from fastserve_worker.backend import BlockMemory, CopyBlock
from fastserve_worker.engine import KvPool
from fastserve_worker.messages import KvShape, SwapDirection, SwapOrder
from fastserve_worker.swap.host_slab import HostSlab

log = logging.getLogger(__name__)


def blocks_of(pool: KvPool, pipeline_block_bytes: int) -> BlockMemory:
    """The memory of `pool`, for the device it is on."""
    shape = KvShape(pool.num_layers, pool.num_kv_heads, pool.head_dim, pool.block_bytes, pipeline_block_bytes)
    return CudaBlocks(pool, shape) if pool.device.type == "cuda" else CpuBlocks(pool, shape)


class CpuBlocks:
    """The pool is memory like the arena: a copy is one memcpy, on one thread, without the interpreter lock.

    numpy copies, not torch: each thread that calls torch would start a team of compute threads of its own.
    """

    def __init__(self, pool: KvPool, shape: KvShape) -> None:
        self.shape = shape
        self._pool = pool

    def attach(self, slab: HostSlab) -> None:
        """Nothing to do."""

    @contextlib.contextmanager
    def copies(self, order: SwapOrder) -> Iterator[CopyBlock]:
        yield self._copy_out if order.direction is SwapDirection.OUT else self._copy_in

    def _copy_out(self, block: int, slot: memoryview) -> None:
        np.copyto(np.frombuffer(slot, np.uint8), self._pool.block_view(block).numpy())

    def _copy_in(self, block: int, slot: memoryview) -> None:
        np.copyto(self._pool.block_view(block).numpy(), np.frombuffer(slot, np.uint8))


class CudaBlocks:
    """One stream per direction, beside the one that computes. Written after the documentation of torch.cuda; not run
    yet, for lack of a device.

    A plan's result is on the host before the plan counts as computed, so an OUT copy reads finished blocks. An event
    recorded behind the last copy is waited for before the swap counts as landed, so compute started after that reads
    what was copied in.
    """

    def __init__(self, pool: KvPool, shape: KvShape) -> None:
        self.shape = shape
        self._pool = pool
        self._streams = {d: torch.cuda.Stream(pool.device) for d in SwapDirection}  # type: ignore[no-untyped-call]  # untyped there

    def attach(self, slab: HostSlab) -> None:
        """Pin the slab for the device. Copies work without, through the driver's own staging memory, and slower."""
        address = np.frombuffer(slab.memory, np.uint8).ctypes.data
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # untyped there
        with torch.cuda.device(self._pool.device):
            status = runtime.cudaHostRegister(address, slab.memory.nbytes, 0)
        if int(status):
            log.warning("cannot pin %d bytes of host memory: CUDA error %d", slab.memory.nbytes, int(status))
            return
        weakref.finalize(slab, runtime.cudaHostUnregister, address)

    @contextlib.contextmanager
    def copies(self, order: SwapOrder) -> Iterator[CopyBlock]:
        stream = self._streams[order.direction]
        landed = torch.cuda.Event()  # type: ignore[no-untyped-call]  # untyped there
        with torch.cuda.stream(stream):
            try:
                yield self._copy_out if order.direction is SwapDirection.OUT else self._copy_in
            finally:
                landed.record(stream)
                landed.synchronize()

    def _copy_out(self, block: int, slot: memoryview) -> None:
        torch.frombuffer(slot, dtype=torch.uint8).copy_(self._pool.block_view(block), non_blocking=True)

    def _copy_in(self, block: int, slot: memoryview) -> None:
        self._pool.block_view(block).copy_(torch.frombuffer(slot, dtype=torch.uint8), non_blocking=True)
