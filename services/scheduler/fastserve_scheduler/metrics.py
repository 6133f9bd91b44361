"""Prometheus metrics: names with vLLM's suffixes where vLLM has them.

Gauges and the core's own totals are taken from a snapshot at each scrape, so they are right also when nothing runs.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fastserve_common.metrics import serve_registry
from fastserve_common.state import DEFAULT_GROUP
from fastserve_common.vllm_names import REPLICA_LABEL, Alias, aliased
from fastserve_scheduler.core.commands import PlanItem, SwapDirection
from fastserve_scheduler.core.snapshot import Snapshot
from fastserve_scheduler.messages import Finished, Refusal, StopReason
from fastserve_scheduler.swap_metrics import Family, swap_families
from fastserve_scheduler.tally_metrics import residency_families, time_families

log = logging.getLogger(__name__)

SCRAPE_TIMEOUT_S = 2.0
#: What vLLM has too and gateways do not know.
VLLM_ALIASES = (
    Alias("kv_cache_usage_perc"),
    Alias("num_preemptions"),
    Alias("num_requests_swapped"),
    Alias("iteration_tokens_total"),
    Alias("request_queue_time_seconds"),
    Alias("request_prefill_time_seconds"),
    Alias("request_decode_time_seconds"),
    Alias("request_inference_time_seconds"),
    Alias("request_prefill_kv_computed_tokens"),
    Alias("cache_config_info"),
    Alias("swap_bytes", "kv_offload_store_bytes", ("direction", "out")),
    Alias("swap_bytes", "kv_offload_load_bytes", ("direction", "in")),
    Alias("swap_copy_seconds", "kv_offload_store_time", ("direction", "out")),
    Alias("swap_copy_seconds", "kv_offload_load_time", ("direction", "in")),
    Alias("swap_size_bytes", "kv_offload_store_size", ("direction", "out")),
    Alias("swap_size_bytes", "kv_offload_load_size", ("direction", "in")),
)
_NS_PER_S = 1e9
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_POWERS_OF_TWO = tuple(float(1 << i) for i in range(15))


class LossCause(StrEnum):
    #: Its stream broke, or was broken because the stage was silent.
    STREAM = "stream"
    #: It could not carry out a plan.
    FAULT = "fault"


class Metrics:
    """What is counted as it happens."""

    def __init__(self, num_stages: int = 0, group: str = DEFAULT_GROUP) -> None:
        """`num_stages`: of which what may happen is counted from zero on."""
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        leads = Gauge("fastserve:leads", "1: this process leads its group", ["group"], registry=self.registry)
        leads.labels(group).set(1)
        self._iteration_seconds = Histogram(
            "fastserve:iteration_seconds",
            "Compute time of one iteration, all stages",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._round_trip_seconds = Histogram(
            "fastserve:iteration_round_trip_seconds",
            "From the sending of a plan to its last report; longer than its compute time by what the wire and the "
            "iterations ahead of it take",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._batch_size = Histogram(
            "fastserve:iteration_batch_size",
            "Requests of one iteration",
            buckets=_POWERS_OF_TWO,
            registry=self.registry,
        )
        self._iteration_tokens = Histogram(
            "fastserve:iteration_tokens_total",
            "Tokens of one iteration",
            buckets=_POWERS_OF_TWO,
            registry=self.registry,
        )
        self._finished = Counter(
            "fastserve:request_success", "Requests ended, by how", ["finished_reason"], registry=self.registry
        )
        self._rejected = Counter(
            "fastserve:admission_rejections", "Requests refused, by why", ["reason"], registry=self.registry
        )
        self._stages_lost = Counter(
            "fastserve:stages_lost", "Times a stage was lost", ["stage", "cause"], registry=self.registry
        )
        self._swap_seconds = Counter(
            "fastserve:swap_copy_seconds", "Time in copies", ["direction", "stage"], registry=self.registry
        )
        self._swaps_failed = Counter(
            "fastserve:swaps_failed", "Copies that a stage could not make", ["stage"], registry=self.registry
        )
        # From zero on: what appears with its first increment has no rate until the second.
        for reason in StopReason:
            self._finished.labels(reason.value)
        for refusal in Refusal:
            self._rejected.labels(refusal.value)
        for stage in map(str, range(num_stages)):
            self._swaps_failed.labels(stage)
            for cause in LossCause:
                self._stages_lost.labels(stage, cause.value)
            for direction in SwapDirection:
                self._swap_seconds.labels(direction.value, stage)

    def iteration(self, compute_ns: int, round_trip_ns: int, items: Sequence[PlanItem]) -> None:
        self._round_trip_seconds.observe(round_trip_ns / _NS_PER_S)
        self._iteration_seconds.observe(compute_ns / _NS_PER_S)
        self._batch_size.observe(len(items))
        self._iteration_tokens.observe(sum(item.num_tokens for item in items))

    def finished(self, finished: Finished) -> None:
        self._finished.labels(finished.reason.value).inc()

    def refused(self, refusal: Refusal) -> None:
        self._rejected.labels(refusal.value).inc()

    def swapped(self, direction: SwapDirection, stage: int, copy_ns: int) -> None:
        self._swap_seconds.labels(direction.value, str(stage)).inc(copy_ns / _NS_PER_S)

    def swap_failed(self, stage: int) -> None:
        self._swaps_failed.labels(str(stage)).inc()

    def stage_lost(self, stage: int, cause: LossCause) -> None:
        self._stages_lost.labels(str(stage), cause.value).inc()


class SnapshotCollector(Collector):
    """Asks the loop for a snapshot: the scrape runs on a thread of its own, the core belongs to the loop's."""

    def __init__(self, loop: asyncio.AbstractEventLoop, take: Callable[[], Snapshot | None]) -> None:
        self._loop, self._take = loop, take

    def describe(self) -> list[Family]:
        """Registering must not scrape."""
        return []

    def collect(self) -> Iterator[Family]:
        async def take() -> Snapshot | None:
            return self._take()

        snapshot = asyncio.run_coroutine_threadsafe(take(), self._loop).result(SCRAPE_TIMEOUT_S)
        if snapshot is not None:
            yield from _gauges(snapshot)
            yield from _levels(snapshot)
            yield from _totals(snapshot)
            yield from swap_families(snapshot.swap)
            yield from residency_families(snapshot.swap.residency)
            yield from time_families(snapshot.times)
            yield from _guessers(snapshot)


def _gauges(snapshot: Snapshot) -> Iterator[Family]:
    used = snapshot.blocks_total - snapshot.blocks_free
    gauges: tuple[tuple[str, str, float], ...] = (
        ("num_requests_running", "Requests in an iteration now", snapshot.running),
        ("num_requests_waiting", "Accepted requests not in an iteration now", snapshot.waiting),
        ("num_queued_tokens", "Prompt tokens of waiting requests", snapshot.waiting_prompt_tokens),
        ("num_requests_resident", "Requests with KV on the device", snapshot.resident),
        ("batches_in_flight", "Iterations on their way through the stages", snapshot.batches_in_flight),
        ("kv_blocks_used", "KV blocks owned by requests", used),
        ("kv_blocks", "KV blocks of the pool", snapshot.blocks_total),
        ("kv_cache_usage_perc", "Used share of the KV pool, 0 to 1", used / max(1, snapshot.blocks_total)),
        ("longest_wait_seconds", "Since the request that waits longest last ran", snapshot.longest_wait_ns / _NS_PER_S),
        ("prefill_correction", "Observed over predicted time of first iterations", snapshot.prefill_correction),
        ("ready", "1 when requests are served", snapshot.ready),
    )
    for name, text, value in gauges:
        yield GaugeMetricFamily(f"fastserve:{name}", text, value=value)
    yield _cache_config(snapshot)


def _cache_config(snapshot: Snapshot) -> GaugeMetricFamily:
    """The labels that vLLM's boards and routers read of many more."""
    labels = {
        "block_size": snapshot.block_size,
        "num_gpu_blocks": snapshot.blocks_total,
        "num_cpu_blocks": snapshot.swap.host_slots_total,
    }
    info = GaugeMetricFamily("fastserve:cache_config_info", "Shape of the KV pool, as labels", labels=list(labels))
    info.add_metric([str(value) for value in labels.values()], 1)
    return info


def _levels(snapshot: Snapshot) -> Iterator[Family]:
    waiting = GaugeMetricFamily("fastserve:queue_waiting", "Waiting requests of a queue", labels=["level"])
    running = GaugeMetricFamily("fastserve:queue_running", "Running requests of a queue", labels=["level"])
    for level, count in enumerate(snapshot.levels):
        waiting.add_metric([str(level)], count.waiting)
        running.add_metric([str(level)], count.running)
    longest = GaugeMetricFamily(
        "fastserve:queue_longest_wait_seconds", "Since the request that waits longest in a queue ran", labels=["level"]
    )
    for level, wait_ns in enumerate(snapshot.longest_wait_ns_by_level):
        longest.add_metric([str(level)], wait_ns / _NS_PER_S)
    demotions = CounterMetricFamily("fastserve:demotions", "Demotions out of a queue", labels=["level"])
    for level, total in enumerate(snapshot.demotions):
        demotions.add_metric([str(level)], total)
    promotions = CounterMetricFamily("fastserve:promotions", "Starving requests promoted, by queue", labels=["level"])
    for level, total in enumerate(snapshot.promotions_by_level):
        promotions.add_metric([str(level)], total)
    yield from (waiting, running, longest, demotions, promotions)


def _guessers(snapshot: Snapshot) -> Iterator[Family]:
    error = GaugeMetricFamily("fastserve:length_log_error", "RMS of ln(guess / length) of answers", labels=["guesser"])
    believed = GaugeMetricFamily("fastserve:length_believed", "1: requests are ranked by it", labels=["guesser"])
    for guesser in snapshot.guessers:
        error.add_metric([guesser.name], guesser.log_error)
        believed.add_metric([guesser.name], guesser.believed)
    yield from (error, believed)


def _totals(snapshot: Snapshot) -> Iterator[Family]:
    preemptions = CounterMetricFamily("fastserve:num_preemptions", "Running requests stopped, by why", labels=["cause"])
    preemptions.add_metric(["slots"], snapshot.preemptions_slots)
    preemptions.add_metric(["tokens"], snapshot.preemptions_tokens)
    preemptions.add_metric(["blocks"], snapshot.preemptions_blocks)
    yield preemptions
    totals = (
        ("iterations", "Iterations begun", snapshot.iterations),
        ("requests_accepted", "Requests accepted", snapshot.accepted),
        ("requests_finished", "Requests ended, in whatever way", snapshot.finished),
        ("tickets", "Starving requests given one token", snapshot.tickets),
        ("generation_tokens", "Tokens generated", snapshot.generated_tokens),
        ("recomputed_tokens", "Tokens computed a second time", snapshot.recomputed_tokens),
    )
    for name, text, value in totals:
        yield CounterMetricFamily(f"fastserve:{name}", text, value=value)


class ReplicaCollector(Collector):
    """The families of several registries as one each, every sample with its replica."""

    def __init__(self, registries: Sequence[CollectorRegistry]) -> None:
        self._registries = registries

    def describe(self) -> list[Family]:
        return []

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for replica, registry in enumerate(self._registries):
            for family in registry.collect():
                whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    labels = {**sample.labels, REPLICA_LABEL: str(replica)}
                    whole.samples.append(sample._replace(labels=labels))
        yield from families.values()


def serve_metrics(
    replicas: Sequence[tuple[Metrics, Callable[[], Snapshot | None]]], host: str, port: int, *, vllm_model: str = ""
) -> tuple[int, Callable[[], None]]:
    """Start the HTTP endpoint on a thread of its own. Returns its port and what stops it. Raises OSError.

    `vllm_model`: the name of the model where vLLM's names are wanted too; empty: they are not.
    """
    for metrics, take in replicas:
        metrics.registry.register(SnapshotCollector(asyncio.get_running_loop(), take))
    registries = [metrics.registry for metrics, _ in replicas]
    registry = registries[0]
    if len(registries) > 1:
        registry = CollectorRegistry()
        registry.register(ReplicaCollector(registries))
    if vllm_model:
        registry = aliased(registry, VLLM_ALIASES, vllm_model)
    return serve_registry(registry, host, port)
