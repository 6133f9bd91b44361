"""The swapping benchmark: its arithmetic, its traces, and that it goes on where it stopped."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fastserve.bench.metrics import Outcome

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("_swapping_report")


@pytest.fixture
def timeline(report: ModuleType) -> ModuleType:
    return importlib.import_module("_timeline")


def event(stage: int, name: str, begin_us: float, dur_us: float) -> dict[str, Any]:
    row = {"compute": 1, "copy out": 2, "copy in": 3}[name]
    return {"name": name, "ph": "X", "pid": stage, "tid": row, "ts": begin_us, "dur": dur_us}


TRACE = {
    "traceEvents": [
        {"name": "process_name", "ph": "M", "pid": 0, "tid": 0, "args": {"name": "stage 0"}},
        event(0, "compute", 0, 1000),
        event(0, "copy out", 900, 200),
        event(1, "copy in", 1000, 100),
        event(0, "compute", 1200, 1000),
        event(0, "copy in", 1300, 100),
    ]
}


def test_a_good_trace_has_no_problems_and_shows_what_was_hidden(timeline: ModuleType, tmp_path: Path) -> None:
    assert timeline.problems(TRACE) == []
    bars = timeline.bars(TRACE)
    # Of 400 us of copies the stage computed during 100 of the first and all of the last; stage 1 never did.
    assert timeline.hidden_share(bars) == pytest.approx(0.5)
    assert timeline.hidden_share([]) == 1.0
    assert timeline.busiest(bars, 250e-6) == pytest.approx(900e-6)
    timeline.save_plot(bars, tmp_path / "t.png", begin_s=0.0, width_s=0.003, title="t")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ({}, "no list"),
        ({"traceEvents": [{"name": "compute", "ph": "X", "pid": 0, "tid": 1, "ts": 1}]}, "lacks"),
        ({"traceEvents": [{"name": "compute", "ph": "?", "pid": 0, "tid": 1}]}, "lacks"),
        ({"traceEvents": [event(0, "compute", 5, -1)]}, "negative"),
        ({"traceEvents": [event(0, "compute", 5, 1), event(1, "compute", 4, 1)]}, "before the one ahead"),
        ({"traceEvents": [event(0, "compute", 5, 10), event(0, "compute", 9, 1)]}, "busy"),
    ],
)
def test_a_broken_trace_is_told(timeline: ModuleType, broken: dict[str, Any], why: str) -> None:
    assert any(why in problem for problem in timeline.problems(broken))


@pytest.fixture
def metrics(report: ModuleType) -> ModuleType:
    return importlib.import_module("_metrics")


def test_counters_are_read_from_a_scrape(metrics: ModuleType) -> None:
    text = (
        '# HELP x y\nfastserve:swap_bytes_total{direction="out"} 7.0\nfastserve:swap_bytes_total{direction="in"} 5\nz 1'
    )
    before, after = metrics.parse(text), metrics.parse(text.replace("7.0", "9.0"))
    got = metrics.difference(after, before)
    assert metrics.total(got, "fastserve:swap_bytes_total") == 2
    assert metrics.total(after, "fastserve:swap_bytes_total", 'direction="in"') == 5
    assert metrics.total(after, "fastserve:swap") == 0


def test_the_working_set_is_what_begun_requests_hold_at_once(report: ModuleType) -> None:
    def outcome(first_s: float, end_s: float, prompt: int, answer: int) -> Outcome:
        return Outcome(
            sent_s=0.0, end_s=end_s, arrival_s=[first_s, end_s], token_counts=[1, answer - 1], input_tokens=prompt,
            output_tokens=answer,
        )  # fmt: skip

    assert report.most_tokens([outcome(1, 4, 10, 5)]) == 11, "it is gone when its last tokens are here"
    assert report.most_tokens([outcome(1, 4, 10, 5), outcome(2, 5, 100, 3)]) == 112
    assert report.most_tokens([outcome(1, 2, 10, 5), outcome(3, 5, 100, 3)]) == 101
    assert report.most_tokens([]) == 0


def test_rows_are_compared_with_the_baseline_at_the_same_load(report: ModuleType, tmp_path: Path) -> None:
    def row(kv_policy: str, load: float, mean_s: float) -> object:
        numbers = dict.fromkeys(report.Row.__dataclass_fields__, 1.0)
        return report.Row(**(numbers | {"kv_policy": kv_policy, "load": load, "mean_normalised_s": mean_s}))

    rows = [row("proactive", 0.9, 0.5), row("recompute", 0.9, 2.0), row("recompute", 1.3, 2.0)]
    text = report.table(rows)
    assert "| 90% | recompute | 1.0 | 1 | 2.000 | 4.00 |" in text
    assert "| 130% | recompute | 1.0 | 1 | 2.000 | - |" in text
    report.save_plot(rows, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.cluster
@pytest.mark.model
@pytest.mark.timeout(600)
def test_a_run_in_pieces_goes_on_where_it_stopped(tmp_path: Path) -> None:
    command = [
        *(sys.executable, str(BENCHMARKS / "swapping.py"), "--quick", "--serve-flag=--fake", "--pieces", "2"),
        *("--out", str(tmp_path), "--pool-blocks", "600", "--block-bytes", "16384"),
    ]
    first = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False, env=os.environ)
    assert first.returncode == 0, first.stderr
    assert "there is more to do" in first.stdout
    begun = json.loads((tmp_path / "swapping.json").read_text())
    assert [row["kv_policy"] for row in begun["rows"]] == ["proactive"]
    second = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False, env=os.environ)
    assert second.returncode == 0, second.stderr
    whole = json.loads((tmp_path / "swapping.json").read_text())
    assert whole["rows"][0] == begun["rows"][0]
    assert [row["kv_policy"] for row in whole["rows"]] == ["proactive", "recompute"]
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".md", ".png"}
    other = subprocess.run([*command, "--seed", "1"], capture_output=True, text=True, timeout=60, check=False)
    assert (other.returncode, "of another plan" in other.stderr) == (1, True)
