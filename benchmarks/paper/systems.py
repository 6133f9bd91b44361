"""What serves: the paper's three models on its hardware, the policies it compares, and where each number comes from.

The paper serves OPT-13B on one A100 40 GB, OPT-66B on four, OPT-175B on sixteen, and gives neither the batch size nor
how the larger two are split. 16 jobs a batch reproduces its first come, first served curve of OPT-13B; tensor
parallelism over 4, and over 8 in two stages, its latency per token at low load (0.04 and 0.06 s).
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from fastserve_scheduler.core import CoreConfig, MlfqConfig
from fastserve_scheduler.core.config import PRESETS
from fastserve_scheduler.sim.cost import OPT_2_7B_PAPER, OPT_13B_A100, LinearCost, LinkCost
from fastserve_scheduler.sim.fleet import Plant
from fastserve_scheduler.sim.study import LINK_LATENCY_NS, Hardware, plant

BLOCK_TOKENS = 16
MODEL_LEN = 2048
MAX_BATCH_TOKENS = 4096
HOST_BYTES_PER_GPU = 56_000_000_000
"""Swap space of the artifact's scripts."""

LINK_BYTES_PER_S = 25_000_000_000
"""PCIe 4.0 x16 as measured with pinned memory, each direction."""

OPT_13B_TOKEN_BYTES = 2 * 40 * 5120 * 2
OPT_2_7B_TOKEN_BYTES = 2 * 32 * 2560 * 2
AMPLE_TOKENS = 1 << 19
NEVER_NS = 1 << 60

Build = Callable[[CoreConfig], Plant]


@dataclass(frozen=True, slots=True)
class Order:
    """A policy and its queues' parameters."""

    policy: str
    mlfq: MlfqConfig = field(default_factory=MlfqConfig)


ORDERS: dict[str, Order] = {
    "fcfs": Order("fcfs"),
    "batch-fcfs": Order("batch-fcfs"),
    "round-robin": Order("round-robin"),
    "fixed-priority": Order("fixed-priority"),
    "naive-mlfq": Order("naive-mlfq", PRESETS["paper"]),
    "naive-mlfq-abort": Order("naive-mlfq", MlfqConfig(alpha_ns=NEVER_NS, overrun="abort")),
    "paper": Order("skip-join-mlfq", PRESETS["paper"]),
    "alpha-10s": Order("skip-join-mlfq"),
    "predicted": Order("predicted"),
    "srpt": Order("srpt"),
}
"""`paper`: skip-join MLFQ with alpha 300 ms; `alpha-10s`: with ours; `predicted`: the service's default. An engine that
aborts long first iterations never ends when starving jobs are promoted into a quantum too short for them, so
`naive-mlfq-abort` does not promote."""


def _fitted(cost: LinearCost, token_bytes: int, kv_tokens: int) -> Build:
    """One GPU whose iteration times somebody measured and fitted."""

    def build(config: CoreConfig) -> Plant:
        block_bytes = BLOCK_TOKENS * token_bytes
        return Plant(
            config=replace(config, kv_block_bytes=block_bytes),
            profile=cost.profile(config.max_model_len, config.max_batch_size),
            cost=cost,
            num_blocks=kv_tokens // BLOCK_TOKENS,
            host_slots=HOST_BYTES_PER_GPU // block_bytes,
            link=LinkCost(block_bytes, LINK_BYTES_PER_S, LINK_LATENCY_NS),
        )

    return build


def _roofline(model: str, device: str, tp: int, pp: int) -> Build:
    """GPUs whose iteration times the roofline predicts; KV has what the weights leave."""
    hardware = Hardware(model, device, tp, pp, host_kv_bytes=HOST_BYTES_PER_GPU * tp * pp)
    return lambda config: plant(hardware, config)


SYSTEMS: dict[str, Build] = {
    "opt-13b": _fitted(OPT_13B_A100, OPT_13B_TOKEN_BYTES, 14_900),
    "opt-13b-80gb": _fitted(OPT_13B_A100, OPT_13B_TOKEN_BYTES, 55_000),
    "opt-13b-ample": _fitted(OPT_13B_A100, OPT_13B_TOKEN_BYTES, AMPLE_TOKENS),
    "opt-2.7b-ample": _fitted(OPT_2_7B_PAPER, OPT_2_7B_TOKEN_BYTES, AMPLE_TOKENS),
    "opt-66b": _roofline("opt-66b", "a100-40", 4, 1),
    "opt-175b": _roofline("opt-175b", "a100-40", 8, 2),
    "llama-3-8b": _roofline("llama-3-8b", "a100-40", 1, 1),
}
"""14,900 and 55,000 tokens: what OPT-13B leaves of 40 and 80 GB."""


def build(system: str, order: str, *, batch: int = 16, kv: str = "proactive", chunk: int = 0) -> Plant:
    """Prompts run whole unless `chunk` says otherwise, as in the paper. Nobody is refused because many wait."""
    chosen = ORDERS[order]
    config = CoreConfig(
        num_stages=1,
        block_size=BLOCK_TOKENS,
        max_batch_size=batch,
        max_batch_tokens=MAX_BATCH_TOKENS,
        max_model_len=MODEL_LEN,
        prefill_chunk_tokens=chunk,
        max_waiting_jobs=1 << 20,
        max_waiting_tokens=1 << 40,
        policy=chosen.policy,
        mlfq=chosen.mlfq,
        kv_policy=kv,
    )
    return SYSTEMS[system](config)
