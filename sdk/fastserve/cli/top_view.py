"""One frame of `fastserve top`, from one or two looks at the scheduler. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from fastserve.cli.top_swap import swapping
from fastserve.v1 import scheduler_pb2 as pb

BAR_WIDTH = 40


@dataclass(frozen=True, slots=True)
class Sample:
    """The scheduler's state at `taken_s` on a monotonic clock."""

    address: str
    taken_s: float
    state: pb.GetStateResponse


def frame(now: Sample, before: Sample | None) -> RenderableType:
    """`before`: an earlier look at the same scheduler, for rates; without one they are left open."""
    moved = swapping(now.state, lambda name: per_second(name, now, before))
    return Group(
        *(_header(now), _levels(now.state), _memory(now.state), moved, _counters(now, before), _stages(now.state))
    )


#: By group of schedulers.
Samples = Mapping[str, Sample]


def frames(now: Samples, before: Samples) -> RenderableType:
    """Of every group, one under the other; one alone has no heading."""
    shown: list[RenderableType] = []
    for group, sample in now.items():
        if len(now) > 1:
            shown.append(Rule(f"group {group}", align="left"))
        shown.append(frame(sample, _comparable(before.get(group), sample)))
    return Group(*shown)


def _comparable(before: Sample | None, now: Sample) -> Sample | None:
    """A new scheduler counts from zero: no rates between two of them."""
    if before is None or now.address != before.address or now.state.iterations < before.state.iterations:
        return None
    return before


def unreachable(reason: str, last: Samples) -> RenderableType:
    """The last known frames under a notice."""
    return Group(Panel(Text(f"{reason}; trying again", style="bold red")), frames(last, {}))


def _header(now: Sample) -> RenderableType:
    state = now.state
    ups = sum(stage.up for stage in state.stages)
    up = Text(f"{ups}/{len(state.stages)} stages up", style="green" if ups == len(state.stages) > 0 else "bold red")
    work = (
        f"  running {state.running}  waiting {state.waiting}  swapped out {state.swapped}"
        f"  batches in flight {state.batches_in_flight}  longest wait {state.longest_wait_ms / 1000:.1f} s"
    )
    return Text.assemble((f"fastserve {state.policy}", "bold"), f" at {now.address}  ", up, work)


def _levels(state: pb.GetStateResponse) -> RenderableType:
    table = Table(title="queues", title_justify="left", expand=False)
    for heading in ("level", "quantum", "waiting", "running"):
        table.add_column(heading, justify="right")
    for level in state.levels:
        table.add_row(str(level.level), quantum(level.quantum_ns), str(level.waiting), str(level.running))
    return table


def quantum(quantum_ns: int) -> str:
    """In the unit that reads best; a policy without quanta has none."""
    if quantum_ns == 0:
        return "-"
    return f"{quantum_ns / 1e9:.2f} s" if quantum_ns >= 1_000_000_000 else f"{quantum_ns / 1e6:.2f} ms"


def _memory(state: pb.GetStateResponse) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for name, total, free in (
        ("device", state.device_blocks_total, state.device_blocks_free),
        ("host", state.host_blocks_total, state.host_blocks_free),
    ):
        table.add_row(f"{name} blocks", bar(total - free, total), f"{total - free} of {total} used")
    return table


def bar(used: int, total: int) -> Text:
    """Green below 70 %, yellow below 90 %, then red. Anything used shows."""
    share = used / total if total else 0.0
    filled = min(max(round(share * BAR_WIDTH), int(used > 0)), BAR_WIDTH)
    style = "green" if share < 0.7 else "yellow" if share < 0.9 else "red"
    return Text.assemble(("█" * filled, style), ("░" * (BAR_WIDTH - filled), "dim"))


def _counters(now: Sample, before: Sample | None) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    names = ("tokens_generated", "iterations", "preemptions", "promotions", "demotions")
    for name in names:
        table.add_row(name.replace("_", " "), f"{getattr(now.state, name):,}", rate(name, now, before))
    return table


def rate(name: str, now: Sample, before: Sample | None) -> str:
    """Per second since the earlier look, for people."""
    per_s = per_second(name, now, before)
    return "- /s" if per_s is None else f"{per_s:,.1f} /s"


def per_second(name: str, now: Sample, before: Sample | None) -> float | None:
    """How fast a counter has risen since the earlier look; None without one."""
    if before is None or now.taken_s <= before.taken_s:
        return None
    rise: int = getattr(now.state, name) - getattr(before.state, name)
    return rise / (now.taken_s - before.taken_s)


def _stages(state: pb.GetStateResponse) -> RenderableType:
    table = Table(title="stages", title_justify="left", expand=False)
    for heading in ("stage", "state", "last iteration", "address"):
        table.add_column(heading)
    for stage in state.stages:
        status = Text("up", style="green") if stage.up else Text("down", style="bold red")
        table.add_row(str(stage.stage), status, quantum(stage.last_iteration_ns), stage.address)
    return table
