"""Gauges are read at scrape: they cannot go stale."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fastserve_kvstore.arena import Arena
from fastserve_kvstore.store import HostStore


class KvStoreCollector(Collector):
    def __init__(self, store: HostStore, arena: Arena) -> None:
        self._store = store
        self._arena = arena

    def collect(self) -> Iterator[Metric]:
        ledger = self._store.ledger
        slots = GaugeMetricFamily("fastserve_kvstore_slots", "Host slots by state", labels=["state"])
        slots.add_metric(["free"], ledger.num_free)
        slots.add_metric(["reserved"], ledger.num_reserved)
        slots.add_metric(["committed"], ledger.num_committed)
        yield slots
        size = GaugeMetricFamily("fastserve_kvstore_arena_bytes", "Size of the arena", labels=["page_locked"])
        size.add_metric([str(self._arena.page_locked).lower()], self._arena.kv_bytes)
        yield size
        yield GaugeMetricFamily(
            "fastserve_kvstore_slabs", "Slabs attached by stages and ranks", value=len(self._store.slabs)
        )
        refused = CounterMetricFamily("fastserve_kvstore_refused", "Commands refused, by reason", labels=["reason"])
        refused.add_metric(["full"], self._store.refusals_full)
        refused.add_metric(["invalid"], self._store.refusals_invalid)
        yield refused
        yield CounterMetricFamily(
            "fastserve_kvstore_leases_expired", "Leases that ran out", value=self._store.leases_expired
        )
        yield CounterMetricFamily(
            "fastserve_kvstore_layout_changes",
            "Layouts replaced: everything stored was lost",
            value=self._store.layout_changes,
        )


def make_registry(store: HostStore, arena: Arena) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(KvStoreCollector(store, arena))
    return registry
