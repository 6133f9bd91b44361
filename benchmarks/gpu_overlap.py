"""Whether copies hide behind computing on a CUDA device: bandwidth per direction, iteration time with and without
swapping beside it, and that what came back is what left.

Uses the worker's own pool, slab and streams (`CudaBlocks`), with the slab pinned as in service. Computing is a chain of
matrix products sized to take about as long as an iteration. Needs one device and a few GiB of its memory.

    python benchmarks/gpu_overlap.py --block-mib 2 --iteration-ms 20
"""

import argparse
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fastserve_common.load import stats
from fastserve_worker.engine import KvPool
from fastserve_worker.messages import SwapDirection, SwapOrder
from fastserve_worker.swap.host_slab import HostSlab
from fastserve_worker.swap.torch_blocks import blocks_of

EXIT_NO_DEVICE = 3
WARM_UPS = 3
#: Of the square matrices that are multiplied.
SIDE = 2048

#: Of a layer's KV; a block of the size asked for has as many layers as that takes.
KV_HEADS, HEAD_DIM, BLOCK_TOKENS = 8, 128, 16


@dataclass(frozen=True, slots=True)
class Shape:
    """Of the pool: as many layers, heads and tokens as make a block of the size asked for."""

    num_blocks: int
    num_layers: int
    num_kv_heads: int = KV_HEADS
    head_dim: int = HEAD_DIM
    block_size: int = BLOCK_TOKENS

    @classmethod
    def of(cls, block_mib: float, num_blocks: int, element_bytes: int = 2) -> "Shape":
        layer_bytes = 2 * KV_HEADS * HEAD_DIM * BLOCK_TOKENS * element_bytes
        return cls(num_blocks, max(1, round(block_mib * (1 << 20) / layer_bytes)))


class Swapper:
    """Half of the pool goes to the host and comes back, as the worker does it. Fills are recognised by their block."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        self.pool = KvPool(
            num_blocks=shape.num_blocks,
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_size=shape.block_size,
            device=device,
            dtype=dtype,
        )
        self.blocks = blocks_of(self.pool, self.pool.block_bytes)
        self.slab = HostSlab.private(shape.num_blocks, self.pool.block_bytes)
        self.blocks.attach(self.slab)
        self.num_blocks = shape.num_blocks

    def fill(self) -> None:
        for block in range(self.num_blocks):
            self.pool.block_view(block).fill_(block % 251 + 1)
        self._settle()

    def _settle(self) -> None:
        """What was written is there for the streams that copy."""
        if self.pool.device.type == "cuda":
            torch.cuda.synchronize(self.pool.device)

    def move(self, direction: SwapDirection, blocks: range) -> float:
        """Seconds that the copies took."""
        order = SwapOrder(1, 1, direction, tuple(blocks), tuple(blocks))
        begin_s = time.perf_counter()
        with self.blocks.copies(order) as copy_block:
            for block in blocks:
                copy_block(block, self.slab.slot(block))
        return time.perf_counter() - begin_s

    def wrong_blocks(self) -> list[int]:
        """Blocks that do not hold what `fill` put there."""
        return [
            block
            for block in range(self.num_blocks)
            if not bool((self.pool.block_view(block) == block % 251 + 1).all())
        ]

    def integrity(self) -> list[int]:
        """Everything out, the pool wiped, everything back; the blocks that are wrong then."""
        everything = range(self.num_blocks)
        self.fill()
        self.move(SwapDirection.OUT, everything)
        for block in everything:
            self.pool.block_view(block).zero_()
        self._settle()
        self.move(SwapDirection.IN, everything)
        return self.wrong_blocks()


def bandwidth(swapper: Swapper, direction: SwapDirection, rounds: int) -> float:
    """Bytes per second, the median round."""
    blocks = range(swapper.num_blocks)
    times_s = sorted(swapper.move(direction, blocks) for _ in range(rounds))
    return len(blocks) * swapper.pool.block_bytes / times_s[len(times_s) // 2]


def beside(work: Callable[[], float], swapper: Swapper, rounds: int) -> tuple[list[float], int]:
    """Times of `work` while both directions copy all the time, each half of the pool; and bytes copied meanwhile."""
    stop, half = threading.Event(), swapper.num_blocks // 2
    copied = [0, 0]

    def copy(index: int, direction: SwapDirection, blocks: range) -> None:
        while not stop.is_set():
            swapper.move(direction, blocks)
            copied[index] += len(blocks) * swapper.pool.block_bytes

    threads = [
        threading.Thread(target=copy, args=(0, SwapDirection.OUT, range(half)), daemon=True),
        threading.Thread(target=copy, args=(1, SwapDirection.IN, range(half, 2 * half)), daemon=True),
    ]
    for thread in threads:
        thread.start()
    times_s = [work() for _ in range(rounds)]
    stop.set()
    for thread in threads:
        thread.join()
    return times_s, sum(copied)


class Iteration:
    """Matrix products that take about `milliseconds`; calling it gives the seconds they took."""

    def __init__(self, milliseconds: float, device: torch.device, dtype: torch.dtype, side: int = SIDE) -> None:
        self._device = device
        self._left = torch.randn(side, side, device=device, dtype=dtype)
        self._right = torch.randn(side, side, device=device, dtype=dtype)
        self._times = 1
        for _ in range(WARM_UPS):
            self()
        self._times = max(1, round(milliseconds / 1e3 / max(self(), 1e-6)))

    def __call__(self) -> float:
        begin_s = time.perf_counter()
        for _ in range(self._times):
            torch.mm(self._left, self._right)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - begin_s


def report(alone_s: list[float], beside_s: list[float], copied_bytes: int) -> str:
    alone, together = stats.mean(alone_s), stats.mean(beside_s)
    rate = copied_bytes / sum(beside_s) / 1e9
    return (
        f"iteration alone {1e3 * alone:.2f} ms, with both directions copying at {rate:.1f} GB/s in all "
        f"{1e3 * together:.2f} ms: {together / alone:.3f} times"
    )


def measure(
    device: torch.device, dtype: torch.dtype, shape: Shape, iteration_ms: float, rounds: int, side: int = SIDE
) -> int:
    """Prints the figures. The exit status: 1 when a block came back wrong."""
    swapper = Swapper(shape, device, dtype)
    size = f"{swapper.num_blocks} blocks of {swapper.pool.block_bytes / (1 << 20):.2f} MiB"
    wrong = swapper.integrity()
    print(f"{size}: {'all came back as they left' if not wrong else f'{len(wrong)} came back wrong: {wrong[:8]}'}")
    if wrong:
        return 1
    for direction in SwapDirection:
        print(f"{direction.value}: {bandwidth(swapper, direction, rounds) / 1e9:.1f} GB/s")
    iteration = Iteration(iteration_ms, device, dtype, side)
    alone_s = [iteration() for _ in range(rounds)]
    print(report(alone_s, *beside(iteration, swapper, rounds)))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--block-mib", type=float, default=2.0, help="of one block, all layers of the stage")
    add("--num-blocks", type=int, default=512)
    add("--iteration-ms", type=float, default=20.0)
    add("--rounds", type=int, default=50)
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("gpu_overlap: there is no CUDA device that torch can use here; nothing was measured", file=sys.stderr)
        return EXIT_NO_DEVICE
    shape = Shape.of(options.block_mib, options.num_blocks)
    return measure(torch.device("cuda"), torch.float16, shape, options.iteration_ms, options.rounds)


if __name__ == "__main__":
    sys.exit(main())
