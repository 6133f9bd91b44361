"""The timeline: what stages did when, on one clock, as a trace that viewers can load."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from fastserve_scheduler.core.commands import SwapDirection
from fastserve_scheduler.timeline import Timeline

from .rig import until_async
from .swap_rig import SwapCluster, ask, be_quick

OUT, IN = SwapDirection


def spans(trace: dict[str, Any]) -> list[tuple[int, str, float, float]]:
    """(stage, what, begin, end) in microseconds."""
    return [
        (event["pid"], event["name"], event["ts"], event["ts"] + event["dur"])
        for event in trace["traceEvents"]
        if event["ph"] == "X"
    ]


def test_stages_of_other_clocks_are_moved_onto_the_listener_s(tmp_path: Path) -> None:
    """Stage 1 is on a node that was started later: its clock is 5 s behind. Messages take 10 us at least."""
    timeline = Timeline(tmp_path / "t.json", 100)
    for number, at_us in enumerate((10_000_000, 10_001_000, 10_002_000), 1):
        begin_ns = at_us * 1000
        timeline.computed(0, 1, number, begin_ns, 500_000, 0, begin_ns + 500_000 + 10_000 * number)
        behind_ns = begin_ns + 500_000 - 5_000_000_000
        timeline.computed(1, 1, number, behind_ns, 500_000, 0, begin_ns + 1_000_000 + 10_000)
    assert spans(timeline.trace()) == [
        (0, "compute", 0, 500), (1, "compute", 500, 1000), (0, "compute", 1000, 1500),
        (1, "compute", 1500, 2000), (0, "compute", 2000, 2500), (1, "compute", 2500, 3000),
    ]  # fmt: skip


def test_another_epoch_may_be_another_node(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "t.json", 100)
    timeline.computed(0, 1, 1, 100_000, 1000, 0, 101_000)
    timeline.computed(0, 2, 2, 9_000_000, 1000, 0, 201_000)
    assert spans(timeline.trace()) == [(0, "compute", 0, 1), (0, "compute", 100, 101)]


def test_waits_and_copies_have_their_rows(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "t.json", 100)
    timeline.computed(0, 1, 7, 10_000, 5000, 2000, 15_000)
    timeline.copied(0, 1, OUT, 3, 8_000, 1000, 4096, 9_000)
    timeline.copied(0, 1, IN, 4, 9_000, 1000, 8192, 10_000)
    events = timeline.trace()["traceEvents"]
    assert isinstance(events, list)
    found = [(e["name"], e["tid"], e["args"]) for e in events if e["ph"] == "X"]
    assert found == [
        ("wait for copies", 1, {"plan": 7}),
        ("copy out", 2, {"swap": 3, "bytes": 4096}),
        ("copy in", 3, {"swap": 4, "bytes": 8192}),
        ("compute", 1, {"plan": 7}),
    ]
    names = {e["tid"]: e["args"] for e in events if e["name"] == "thread_name"}
    assert names == {1: {"name": "compute"}, 2: {"name": "copy out"}, 3: {"name": "copy in"}}


def test_the_ring_keeps_the_last_ones_and_stages_that_say_nothing_are_left_out(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "t.json", 2)
    for seq in range(5):
        timeline.computed(0, 1, seq, 1000 * (seq + 1), 500, 0, 1000 * (seq + 1) + 500)
    timeline.computed(0, 1, 9, 0, 500, 0, 99_000)
    timeline.copied(0, 1, OUT, 9, 0, 0, 0, 99_000)
    assert [span[2:] for span in spans(timeline.trace())] == [(0, 0.5), (1, 1.5)]
    assert Timeline(tmp_path / "t.json", 1).trace()["traceEvents"] == []


def test_a_file_that_cannot_be_written_costs_the_trace_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        Timeline(tmp_path / "missing" / "t.json", 1).close()
    assert "the timeline is lost" in caplog.text


async def test_a_swapping_pipeline_leaves_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    be_quick(monkeypatch)
    path = tmp_path / "trace.json"
    flags = ["--kv-policy", "reactive", "--max-num-seqs", "3", "--alpha-ms", "30", "--timeline", str(path)]
    async with SwapCluster(tmp_path, 2, num_blocks=24, num_slots=256, flags=flags) as cluster:
        gateway = await cluster.gateway()
        for answer, expected in [await ask(gateway, n, 8, 24) for n in range(9)]:
            assert (await answer.done()).ids == expected

        async def came_back() -> bool:
            return (await cluster.state()).swaps_in > 0

        await until_async(came_back)
    found = spans(json.loads(path.read_text()))
    assert {(stage, name) for stage, name, _, _ in found} >= {
        (stage, name) for stage in (0, 1) for name in ("compute", "copy out", "copy in")
    }
    assert all(0 <= begin <= end for _, _, begin, end in found)
    assert [begin for _, _, begin, _ in found] == sorted(begin for _, _, begin, _ in found)
