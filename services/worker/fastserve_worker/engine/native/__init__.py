"""Native kernels of the CPU engine: compiled at first use, absent where they cannot be."""

from fastserve_worker.engine.native.kernels import NativeKernels, load_kernels

__all__ = ["NativeKernels", "load_kernels"]
