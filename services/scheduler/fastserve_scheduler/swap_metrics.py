"""What Prometheus sees of swapping, taken from a snapshot of the core."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from fastserve_scheduler.core.enst import ERROR_BOUNDS_NS
from fastserve_scheduler.core.snapshot import SwapSnapshot
from fastserve_scheduler.core.tally import TallySnapshot
from fastserve_scheduler.tally_metrics import NS_PER_S, histogram, histograms

Family = GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily


def swap_families(swap: SwapSnapshot) -> Iterator[Family]:
    """Also without a kvstore: then they are zero."""
    yield from _gauges(swap)
    by_direction = (
        ("swaps", "Swaps that landed, in whatever way", swap.swaps_out, swap.swaps_in),
        ("swap_bytes", "Bytes copied, all stages", swap.bytes_out, swap.bytes_in),
    )
    for name, text, out, in_ in by_direction:
        counter = CounterMetricFamily(f"fastserve:{name}", text, labels=["direction"])
        counter.add_metric(["out"], out)
        counter.add_metric(["in"], in_)
        yield counter
    totals: tuple[tuple[str, str, float], ...] = (
        ("swap_blocked_seconds", "Time that requests waited for copies alone", swap.blocked_ns / NS_PER_S),
        ("swap_roomless_seconds", "Time that swapped requests waited for blocks", swap.roomless_ns / NS_PER_S),
        ("swap_stalled_seconds", "Time without an iteration because of copies", swap.stalled_ns / NS_PER_S),
        ("swap_clean_blocks", "Blocks that left without a copy: the host had them", swap.clean_blocks_reused),
        ("swap_promotions_put_off", "Promotions that waited for the link", swap.promotions_put_off),
    )
    for name, text, value in totals:
        yield CounterMetricFamily(f"fastserve:{name}", text, value=value)
    yield histograms("swap_size_bytes", "Bytes of one swap, all stages together", "direction", swap.sizes.items())
    text = "When a swapped request ran again, minus when it was estimated to"
    error = TallySnapshot(ERROR_BOUNDS_NS, swap.enst_error_counts, swap.enst_error_sum_ns)
    yield histogram("enst_error_seconds", text, error, NS_PER_S)


def _gauges(swap: SwapSnapshot) -> Iterator[Family]:
    used = swap.host_slots_total - swap.host_slots_free
    gauges = (
        ("num_requests_swapped", "Requests with KV on the host alone", swap.swapped),
        ("host_slots_used", "Host slots that hold KV, or will", used),
        ("host_slots", "Host slots that every stage can swap with", swap.host_slots_total),
        ("swap_blocks_leaving", "Device blocks on their way to the host", swap.blocks_leaving),
    )
    for name, text, value in gauges:
        yield GaugeMetricFamily(f"fastserve:{name}", text, value=value)
    in_flight = GaugeMetricFamily("fastserve:swaps_in_flight", "Swaps under way", labels=["direction"])
    in_flight.add_metric(["out"], swap.in_flight_out)
    in_flight.add_metric(["in"], swap.in_flight_in)
    yield in_flight
