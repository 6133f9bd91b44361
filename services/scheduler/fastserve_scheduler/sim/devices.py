"""Devices as data: what a roofline needs to know, and how much of it kernels reach.

Peaks are the vendors' data sheets (dense, no sparsity). The shares, `layer_ns`, `sequence_ns` and `peer_latency_ns` are
fitted to public measurements of A100 and H100, and to our own of the CPU (`calibration.py` has each with its error).
H200 and A10 are not measured: they take the values of the device whose architecture they share.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or one machine's processor.

    `layer_ns`: launching one layer's kernels, paid by each layer of an iteration. `sequence_ns`: work per sequence and
    layer that no tensor is wide enough to hide. `peer_bytes_per_second`, `peer_latency_ns`: one all-reduce among the
    ranks of a stage. `host_bytes_per_second`: to the host and back, each direction.
    """

    name: str
    memory_bytes: int
    bytes_per_second: float
    flops_per_second: float
    bandwidth_share: float
    compute_share: float
    attention_share: float
    layer_ns: int
    sequence_ns: int
    peer_bytes_per_second: float
    peer_latency_ns: int
    host_bytes_per_second: int
    #: Bytes of a weight and of a KV element.
    element_bytes: int = 2


_GIB = 1 << 30
_AMPERE = {"bandwidth_share": 0.75, "compute_share": 0.66, "attention_share": 0.40}
_HOPPER = {"bandwidth_share": 0.69, "compute_share": 0.67, "attention_share": 0.40}


def _gpu(name: str, memory_gib: int, tb_per_s: float, tflops: float, shares: dict[str, float], **link: float) -> Device:
    return Device(
        name=name,
        memory_bytes=memory_gib * _GIB,
        bytes_per_second=tb_per_s * 1e12,
        flops_per_second=tflops * 1e12,
        bandwidth_share=shares["bandwidth_share"],
        compute_share=shares["compute_share"],
        attention_share=shares["attention_share"],
        layer_ns=100_000,
        sequence_ns=600,
        peer_bytes_per_second=link["peer_gb_per_s"] * 1e9,
        peer_latency_ns=38_000,
        host_bytes_per_second=round(link["host_gb_per_s"] * 1e9),
    )


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        _gpu("a100-40", 40, 1.555, 312, _AMPERE, peer_gb_per_s=235, host_gb_per_s=25),
        _gpu("a100-80", 80, 2.039, 312, _AMPERE, peer_gb_per_s=235, host_gb_per_s=25),
        _gpu("h100", 80, 3.35, 989, _HOPPER, peer_gb_per_s=380, host_gb_per_s=50),
        _gpu("h200", 141, 4.8, 989, _HOPPER, peer_gb_per_s=380, host_gb_per_s=50),
        _gpu("a10", 24, 0.6, 125, _AMPERE, peer_gb_per_s=25, host_gb_per_s=25),
        Device("cpu", 8 * _GIB, 16.0e9, 177e9, 1.0, 0.90, 0.12, 10_000, 500, 8e9, 50_000, 4_000_000_000, 4),
        Device("cpu-1", 8 * _GIB, 10.4e9, 90e9, 1.4, 0.90, 0.12, 10_000, 500, 5e9, 50_000, 4_000_000_000, 4),
    )
}
"""`cpu`: two cores of an AMD EPYC (Zen 3, AVX2), both threads of one process; `cpu-1`: one of them. Their peaks are
measured: 16.0 and 10.4 GB/s read, 177 and 90 GFLOP/s in fp32. `cpu-1` is fitted to runs during which the neighbours on
the memory bus were quieter than when its peak was taken: hence a share above 1. `cpu` is not fitted."""
