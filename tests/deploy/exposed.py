"""What the services' own registries expose, by the job that Prometheus scrapes it under."""

import asyncio
import functools
from collections.abc import Mapping
from contextlib import closing

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from fastserve_common.vllm_names import aliased
from fastserve_gateway.metrics import Metrics as GatewayMetrics
from fastserve_kvstore.arena import Arena
from fastserve_kvstore.metrics import make_registry
from fastserve_kvstore.store import HostStore
from fastserve_scheduler.core.commands import SwapDirection
from fastserve_scheduler.core.config import CoreConfig
from fastserve_scheduler.core.events import StageUp
from fastserve_scheduler.core.profile import Profile
from fastserve_scheduler.core.scheduler import SchedulerCore
from fastserve_scheduler.core.snapshot import take
from fastserve_scheduler.messages import Finished, Refusal, StopReason
from fastserve_scheduler.metrics import VLLM_ALIASES, LossCause, SnapshotCollector
from fastserve_scheduler.metrics import Metrics as SchedulerMetrics
from fastserve_worker.control import Stage
from fastserve_worker.fake_stage import FakeStage
from fastserve_worker.metrics import StageMetrics
from fastserve_worker.runner import StageRunner
from fastserve_worker.swap.copier import Copier

#: Of every target, put there by Prometheus.
TARGET_LABELS = frozenset({"job", "instance"})

Samples = Mapping[str, frozenset[str]]


@functools.cache
def expositions() -> Mapping[str, bytes]:
    """What a scrape gets, by job."""
    return {
        "fastserve-gateway": _gateway(),
        "fastserve-scheduler": asyncio.run(_scheduler()),
        "fastserve-stage": asyncio.run(_stage()),
        "fastserve-kvstore": _kvstore(),
    }


@functools.cache
def exposed() -> Mapping[str, Samples]:
    """Labels by name of the sample, by job."""
    return {job: _samples(text.decode()) for job, text in expositions().items()}


def _samples(text: str) -> Samples:
    families = text_string_to_metric_families(text)
    found = {sample.name: frozenset(sample.labels) for family in families for sample in family.samples}
    return {**found, "up": frozenset()}


def _gateway() -> bytes:
    metrics = GatewayMetrics("a-model", vllm_names=True)
    groups = {"default": (True, 0)}
    metrics.watch(running=float, waiting=float, connected=float, serving=bool, groups=lambda: groups)
    metrics.admission_rejected("max_num_queued_reqs")
    metrics.http("/health", 200)
    return metrics.render()


async def _scheduler() -> bytes:
    core = SchedulerCore(
        CoreConfig(num_stages=1, block_size=16, max_batch_size=1, max_batch_tokens=64, max_model_len=64),
        Profile(prefill=((1, 1000), (64, 9000)), decode=((1, 1, 1000),)),
    )
    core.handle(StageUp(0, 100), 0)
    metrics = SchedulerMetrics()
    metrics.refused(Refusal.TOO_LONG)
    metrics.stage_lost(0, LossCause.STREAM)
    for direction in SwapDirection:
        metrics.swapped(direction, 0, 1)
    metrics.swap_failed(0)
    metrics.finished(Finished("a", StopReason.LENGTH, 0, 1, 0))
    metrics.registry.register(SnapshotCollector(asyncio.get_running_loop(), lambda: take(core, True, 0)))
    served = aliased(metrics.registry, VLLM_ALIASES, "a-model")
    return await asyncio.to_thread(generate_latest, served)


async def _stage() -> bytes:
    metrics, runner = StageMetrics(0), StageRunner()
    stage = Stage(FakeStage(), runner, Copier(FakeStage().memory), metrics)
    metrics.watch(stage, runner.busy_s)
    text = generate_latest(metrics.registry)
    await stage.copier.close(1.0)
    await runner.close(1.0)
    return text


def _kvstore() -> bytes:
    with closing(Arena.open(1 << 16)) as arena:
        return generate_latest(make_registry(HostStore(arena.kv_bytes, 1, 10**9), arena))
