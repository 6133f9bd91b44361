"""The host's part of a frame of `fastserve top`: what moves between device and host, and what waits for it. Pure."""

from collections.abc import Callable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fastserve.v1 import scheduler_pb2 as pb
from fastserve_common.units import format_bytes

#: A counter of the scheduler's state -> its rise per second since the look before; None without one.
PerSecond = Callable[[str], float | None]


def swapping(state: pb.GetStateResponse, per_s: PerSecond) -> RenderableType:
    """A sentence in place of numbers when nothing has ever been swapped and nothing can be."""
    if not (state.host_blocks_total or state.swaps_out or state.swaps_in):
        return Text("no host memory to swap with", style="dim")
    return Group(_traffic(state, per_s), _blocked(state, per_s))


def _traffic(state: pb.GetStateResponse, per_s: PerSecond) -> RenderableType:
    table = Table(title="swaps", title_justify="left", expand=False)
    for heading in ("direction", "in flight", "swaps", "swaps/s", "bytes", "bytes/s"):
        table.add_column(heading, justify="left" if heading == "direction" else "right")
    leaving = state.swaps_in_flight_out
    rows = (
        ("out", leaving, state.swaps_out, state.swap_bytes_out),
        ("in", state.swaps_in_flight - leaving, state.swaps_in, state.swap_bytes_in),
    )
    for direction, in_flight, swaps, num_bytes in rows:
        swaps_per_s, bytes_per_s = per_s(f"swaps_{direction}"), per_s(f"swap_bytes_{direction}")
        table.add_row(
            *(direction, str(in_flight), f"{swaps:,}", "-" if swaps_per_s is None else f"{swaps_per_s:,.1f}"),
            *(format_bytes(num_bytes), "-" if bytes_per_s is None else f"{format_bytes(round(bytes_per_s))}/s"),
        )
    return table


def _blocked(state: pb.GetStateResponse, per_s: PerSecond) -> RenderableType:
    """Seconds of waiting per second are requests that wait, on average."""
    total = f"{state.swap_blocked_ns / 1e9:.1f} s in all"
    ns_per_s = per_s("swap_blocked_ns")
    now = "" if ns_per_s is None else f"{ns_per_s / 1e9:.2f} requests on average, "
    return Text(f"blocked on swaps: {now}{total}")
