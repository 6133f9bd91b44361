"""Histograms that the core keeps, as Prometheus wants them."""

from collections.abc import Iterable, Iterator
from itertools import accumulate
from math import inf

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from fastserve_scheduler.core.request_times import RequestTimesSnapshot
from fastserve_scheduler.core.residency import ResidencySnapshot
from fastserve_scheduler.core.tally import TallySnapshot

NS_PER_S = 1e9


def time_families(times: RequestTimesSnapshot) -> Iterator[HistogramMetricFamily]:
    """By vLLM's names."""
    phases = (
        ("queue", "From a request's arrival to its first iteration", times.queue),
        ("prefill", "From a request's first iteration to its first token", times.prefill),
        ("decode", "From a request's first token to its end", times.decode),
        ("inference", "From a request's first iteration to its end", times.inference),
    )
    for phase, text, tally in phases:
        yield histogram(f"request_{phase}_time_seconds", text, tally, NS_PER_S)
    text = "Tokens of a request's prefills, those computed again included"
    yield histogram("request_prefill_kv_computed_tokens", text, times.prefill_tokens)


def residency_families(residency: ResidencySnapshot) -> Iterator[HistogramMetricFamily]:
    stays = (
        ("device", "How long a request's KV was on the device, by how that ended", residency.device),
        ("host", "How long a request's KV was on the host alone, by how that ended", residency.host),
    )
    for place, text, by_end in stays:
        yield histograms(f"kv_{place}_residency_seconds", text, "end", by_end.items(), NS_PER_S)
    text = "Since a request last ran, when its KV left the device for others"
    yield histogram("kv_idle_before_evict_seconds", text, residency.idle_before_evict, NS_PER_S)
    text = "From the last iteration before a request's KV went to the host to the next one"
    yield histogram("kv_reuse_gap_seconds", text, residency.reuse_gap, NS_PER_S)


def histogram(name: str, text: str, tally: TallySnapshot, unit: float = 1) -> HistogramMetricFamily:
    """`unit`: what the tally counts by is divided by it."""
    family = HistogramMetricFamily(f"fastserve:{name}", text, labels=[])
    family.add_metric([], _buckets(tally, unit), tally.total / unit)
    return family


def histograms(
    name: str, text: str, label: str, tallies: Iterable[tuple[str, TallySnapshot]], unit: float = 1
) -> HistogramMetricFamily:
    """One family with a histogram for each value of `label`: its tally."""
    family = HistogramMetricFamily(f"fastserve:{name}", text, labels=[label])
    for value, tally in tallies:
        family.add_metric([str(value)], _buckets(tally, unit), tally.total / unit)
    return family


def _buckets(tally: TallySnapshot, unit: float) -> list[tuple[str, float]]:
    """Each with what the buckets below it hold too."""
    bounds = [_le(bound / unit) for bound in (*tally.bounds, inf)]
    return [(bound, float(count)) for bound, count in zip(bounds, accumulate(tally.counts), strict=True)]


def _le(bound: float) -> str:
    """As the client library writes the bounds of its own histograms."""
    return str(floatToGoString(bound))  # type: ignore[no-untyped-call]  # it has no annotations
