"""From names to a plant and a run: the short way for experiments."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from fastserve_scheduler.core.config import CoreConfig
from fastserve_scheduler.sim.arrivals import Request
from fastserve_scheduler.sim.cost import LinkCost
from fastserve_scheduler.sim.devices import DEVICES
from fastserve_scheduler.sim.fleet import Fleet, Outcome, Plant
from fastserve_scheduler.sim.models import MODELS
from fastserve_scheduler.sim.roofline import RooflineCost
from fastserve_scheduler.sim.router import ROUTERS

LINK_LATENCY_NS = 20_000


@dataclass(frozen=True, slots=True)
class Hardware:
    """`kv_bytes` on the device, all stages and ranks together; None: what the weights leave. `host_kv_bytes`: on the
    host. `link_bytes_per_second`: each direction of one stage; None: the device's."""

    model: str
    device: str
    tp: int = 1
    pp: int = 1
    kv_bytes: int | None = None
    host_kv_bytes: int = 0
    link_bytes_per_second: int | None = None


def plant(hardware: Hardware, config: CoreConfig) -> Plant:
    """`config` is taken as it is, but for the stages and the size of a block. Raises ValueError with a sentence."""
    cost = RooflineCost(MODELS[hardware.model], DEVICES[hardware.device], hardware.tp, hardware.pp)
    block_bytes = cost.kv_bytes_per_token * config.block_size
    stage_block_bytes = cost.stage_kv_bytes_per_token() * config.block_size
    kv_bytes = cost.free_kv_bytes() if hardware.kv_bytes is None else hardware.kv_bytes
    if kv_bytes < block_bytes:
        raise ValueError(f"{kv_bytes} bytes for KV do not hold one block of {block_bytes} bytes")
    config = replace(config, num_stages=hardware.pp, kv_block_bytes=stage_block_bytes)
    bandwidth = hardware.link_bytes_per_second or cost.device.host_bytes_per_second
    return Plant(
        config=config,
        profile=cost.profile(config.max_model_len, config.max_batch_size),
        cost=cost,
        num_blocks=kv_bytes // block_bytes,
        host_slots=hardware.host_kv_bytes // block_bytes,
        link=LinkCost(stage_block_bytes, bandwidth, LINK_LATENCY_NS),
    )


def run(
    system: Plant, requests: Iterable[Request], *, num_replicas: int = 1, router: str = "round-robin", seed: int = 0
) -> Outcome:
    fleet = Fleet(system, num_replicas=num_replicas, router=ROUTERS[router](seed))
    return fleet.run(requests)
