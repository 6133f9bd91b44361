"""What one stage counts. Histograms are filled as iterations end; the rest is read at the scrape, so that it is right
also when nothing runs."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fastserve_worker.control import Stage
from fastserve_worker.messages import Plan
from fastserve_worker.swap.copier import Copier

_NS_PER_S = 1e9
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_POWERS_OF_TWO = tuple(float(1 << i) for i in range(15))


class StageMetrics:
    """Every metric has the label `stage`: Prometheus need not know which target is which."""

    def __init__(self, stage: int) -> None:
        self.registry = CollectorRegistry()
        self._stage = str(stage)
        ProcessCollector(registry=self.registry)
        self._seconds = self._histogram("iteration_seconds", "Compute time of one iteration on this stage", _SECONDS)
        self._tokens = self._histogram("iteration_tokens", "Tokens of one iteration", _POWERS_OF_TWO)
        self._rows = self._histogram("iteration_batch_size", "Requests of one iteration", _POWERS_OF_TWO)
        self._computed = Counter(
            "fastserve:stage_tokens", "Tokens computed, by phase", ["stage", "phase"], registry=self.registry
        )
        self._parts = Counter(
            "fastserve:stage_forward_seconds",
            "Time of iterations, by what it went into: compute, waiting for copies, handing on to the next stage",
            ["stage", "part"],
            registry=self.registry,
        )
        self._faults = self._counter("faults", "Epochs that ended with a fault")
        for phase in ("prefill", "decode"):
            self._computed.labels(self._stage, phase)
        for part in ("compute", "copies", "send"):
            self._parts.labels(self._stage, part)

    def computed(self, plan: Plan, compute_ns: int, blocked_ns: int) -> None:
        """One iteration; a plan that is there for its swaps alone is none."""
        if not plan.rows:
            return
        self._seconds.observe(compute_ns / _NS_PER_S)
        self._tokens.observe(plan.num_tokens)
        self._rows.observe(len(plan.rows))
        # A row that goes on after what is known already with one token more is a decode, whatever came before it.
        decoded = sum(row.num_tokens == 1 and row.start > 0 for row in plan.rows)
        self._computed.labels(self._stage, "decode").inc(decoded)
        self._computed.labels(self._stage, "prefill").inc(plan.num_tokens - decoded)
        self._parts.labels(self._stage, "compute").inc(compute_ns / _NS_PER_S)
        self._parts.labels(self._stage, "copies").inc(blocked_ns / _NS_PER_S)

    def sent(self, send_ns: int) -> None:
        """Activations of one iteration, until the stream had taken them."""
        self._parts.labels(self._stage, "send").inc(send_ns / _NS_PER_S)

    def faulted(self) -> None:
        self._faults.inc()

    def watch(self, stage: Stage, busy_s: Callable[[], float]) -> None:
        """`busy_s`: for how long the iteration in progress has been running."""
        self.registry.register(_StageCollector(self._stage, stage, busy_s))

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(f"fastserve:stage_{name}", text, ["stage"], buckets=buckets, registry=self.registry)
        return family.labels(self._stage)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"fastserve:stage_{name}", text, ["stage"], registry=self.registry).labels(self._stage)


class _StageCollector(Collector):
    def __init__(self, label: str, stage: Stage, busy_s: Callable[[], float]) -> None:
        self._label, self._stage, self._busy_s = label, stage, busy_s

    def collect(self) -> Iterator[Metric]:
        info, host = self._stage.info, self._stage.host
        gauges: tuple[tuple[str, str, float], ...] = (
            ("busy_seconds", "Since the iteration in progress began; 0: none is", self._busy_s()),
            ("kv_blocks", "KV blocks of the pool", info.num_blocks),
            ("kv_bytes", "Memory of the KV pool", info.num_blocks * info.kv_block_bytes),
            ("host_attached", "1 while there is host memory to swap with", host is not None),
        )
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(f"fastserve:stage_{name}", text, labels=["stage"])
            gauge.add_metric([self._label], value)
            yield gauge
        epochs = CounterMetricFamily("fastserve:stage_epochs", "Times that a scheduler configured it", labels=["stage"])
        epochs.add_metric([self._label], self._stage.num_epochs)
        yield epochs
        yield from _copies(self._label, self._stage.copier)


def _copies(label: str, copier: Copier) -> Iterator[Metric]:
    in_flight = GaugeMetricFamily("fastserve:stage_copies_in_flight", "Copies under way", labels=["stage", "direction"])
    names = (
        ("copies", "Copies that ended, in whatever way"),
        ("copies_failed", "Copies that could not be made"),
        ("copy_bytes", "Bytes copied"),
        ("copy_seconds", "Time in copies, not waiting for them to begin"),
    )
    totals = [CounterMetricFamily(f"fastserve:stage_{n}", text, labels=["stage", "direction"]) for n, text in names]
    for direction, counters in copier.counters.items():
        labels = [label, direction.value]
        in_flight.add_metric(labels, counters.in_flight)
        values = (counters.finished, counters.failed, counters.num_bytes, counters.copy_ns / _NS_PER_S)
        for family, value in zip(totals, values, strict=True):
            family.add_metric(labels, value)
    yield in_flight
    yield from totals
