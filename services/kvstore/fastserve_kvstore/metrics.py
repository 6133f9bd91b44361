"""Gauges are read at scrape: they cannot go stale. Counters begin with the daemon."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fastserve_kvstore.arena import Arena
from fastserve_kvstore.store import HostStore


class KvStoreCollector(Collector):
    def __init__(self, store: HostStore, arena: Arena) -> None:
        self._store = store
        self._arena = arena

    def collect(self) -> Iterator[Metric]:
        yield from self._memory()
        yield from self._peers()
        yield from self._counters()

    def _memory(self) -> Iterator[Metric]:
        ledger = self._store.ledger
        counts = {"free": ledger.num_free, "reserved": ledger.num_reserved, "committed": ledger.num_committed}
        slots = GaugeMetricFamily("fastserve_kvstore_slots", "Host slots by state", labels=["state"])
        taken = GaugeMetricFamily("fastserve_kvstore_taken_bytes", "Arena by state of its slots", labels=["state"])
        for state, count in counts.items():
            slots.add_metric([state], count)
            if state != "free":
                taken.add_metric([state], count * self._store.slot_bytes)
        yield slots
        yield taken
        size = GaugeMetricFamily("fastserve_kvstore_arena_bytes", "Size of the arena", labels=["page_locked"])
        size.add_metric([str(self._arena.page_locked).lower()], self._arena.kv_bytes)
        yield size

    def _peers(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "fastserve_kvstore_slabs", "Slabs attached by stages and ranks", value=len(self._store.slabs)
        )
        connected = float(self._store.scheduler_connected)
        yield GaugeMetricFamily(
            "fastserve_kvstore_scheduler_connected", "1 while a scheduler is connected", value=connected
        )

    def _counters(self) -> Iterator[Metric]:
        moved = CounterMetricFamily("fastserve_kvstore_slot_events", "What happened to slots", labels=["event"])
        for event, count in self._store.slot_events.items():
            moved.add_metric([event], count)
        yield moved
        refused = CounterMetricFamily("fastserve_kvstore_refused", "Commands refused, by reason", labels=["reason"])
        refused.add_metric(["full"], self._store.refusals_full)
        refused.add_metric(["invalid"], self._store.refusals_invalid)
        yield refused
        counters = (
            ("attaches", "Times that a stage or rank asked for its slab and got it", self._store.attaches),
            ("leases_expired", "Leases that ran out", self._store.leases_expired),
            ("layout_changes", "Layouts replaced: everything stored was lost", self._store.layout_changes),
        )
        for name, text, value in counters:
            yield CounterMetricFamily(f"fastserve_kvstore_{name}", text, value=value)


def make_registry(store: HostStore, arena: Arena) -> CollectorRegistry:
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(KvStoreCollector(store, arena))
    return registry
