"""A small system that simulates in milliseconds."""

from dataclasses import replace

from fastserve_scheduler.core.config import CoreConfig
from fastserve_scheduler.sim.cost import LinearCost, LinkCost
from fastserve_scheduler.sim.fleet import Plant

MS = 1_000_000
COST = LinearCost(
    prefill_fixed_ns=2 * MS,
    prefill_token_ns=20_000,
    prefill_token_squared_ns=0.0,
    decode_fixed_ns=MS,
    decode_job_ns=10_000,
    decode_context_ns=10.0,
)


def plant(num_blocks: int = 256, host_slots: int = 0, num_stages: int = 1, **config: object) -> Plant:
    core = CoreConfig(num_stages=num_stages, block_size=4, max_batch_size=4, max_batch_tokens=256, max_model_len=128)
    core = replace(core, **config)  # type: ignore[arg-type]  # fields of CoreConfig by name
    cost = replace(COST, num_stages=num_stages)
    return Plant(core, cost.profile(128, 4), cost, num_blocks, host_slots, LinkCost(4096, 25_000_000))
