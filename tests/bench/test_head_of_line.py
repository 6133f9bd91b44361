"""The head-of-line benchmark: its arithmetic, and that it leaves nothing behind."""

import contextlib
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from fastserve.bench.metrics import Outcome, Run

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("head_of_line")


def plan(bench: ModuleType, **changes: object) -> object:
    values = {
        **{"model": "m", "serve_flags": ("--stages", "1"), "policies": ("fcfs",), "loads": (0.7,)},
        **{"num_prompts": 40, "repeats": 1, "seed": 3, "max_num_seqs": 8},
        **{"mean_input": 30, "mean_output": 30, "max_input": 64, "max_output": 64},
    }
    return bench.Plan(**(values | changes))


def test_every_policy_gets_the_same_trace(bench: ModuleType) -> None:
    one = plan(bench)
    assert one.requests(3) == one.requests(3) != one.requests(4)  # type: ignore[attr-defined]  # a module by path
    slow, fast = one.offsets_s(3, 1.0), one.offsets_s(3, 2.0)  # type: ignore[attr-defined]  # a module by path
    assert [s / 2 for s in slow] == pytest.approx(fast)
    assert slow[-1] == pytest.approx(40)


def test_lengths_are_scaled_and_cut(bench: ModuleType) -> None:
    requests = plan(bench, num_prompts=4000, max_input=400, max_output=400).requests(0)  # type: ignore[attr-defined]
    assert sum(r.input_tokens for r in requests) / 4000 == pytest.approx(30, rel=0.1)
    assert sum(r.output_tokens for r in requests) / 4000 == pytest.approx(30, rel=0.1)
    assert max(r.output_tokens for r in plan(bench).requests(0)) <= 64  # type: ignore[attr-defined]  # a module by path


def test_flags(bench: ModuleType) -> None:
    flags = plan(bench).flags("paper")  # type: ignore[attr-defined]  # a module by path
    expected = "--policy skip-join-mlfq --preset paper --max-num-seqs 8 --stages 1"
    assert flags == tuple(expected.split())


def test_capacity_counts_the_full_batch_only(bench: ModuleType) -> None:
    """Two tokens per second while saturated; the last request is sent at 8 and drags on alone until 20."""
    steady = Outcome(
        sent_s=0.0, end_s=8.0, arrival_s=[i / 2 for i in range(16)], token_counts=[1] * 16, output_tokens=16
    )
    last = Outcome(sent_s=8.0, end_s=20.0, arrival_s=[9.0, 20.0], token_counts=[1, 1], output_tokens=2)
    assert bench.saturated_tokens_per_s(Run([steady, last], 20.0)) == pytest.approx(2.0)
    at_once = Run([steady], 8.0)
    assert bench.saturated_tokens_per_s(at_once) == 2.0


def row(bench: ModuleType, policy: str, repeat: int, mean_s: float) -> object:
    report = importlib.import_module("_head_of_line_report")
    numbers = dict.fromkeys(report.Row.__dataclass_fields__, 1.0)
    return report.Row(
        **(numbers | {"policy": policy, "load": 0.7, "repeat": repeat, "completed": 1, "mean_normalised_s": mean_s})
    )


def test_ratios_are_paired_by_repeat(bench: ModuleType, tmp_path: Path) -> None:
    report = importlib.import_module("_head_of_line_report")
    measured = [("fcfs", 0, 1.0), ("fcfs", 1, 4.0), ("default", 0, 0.5), ("default", 1, 1.0)]
    rows = [row(bench, *values) for values in measured]
    text = report.table(rows, "fcfs")
    assert "| 70% | fcfs | 2 | 1 | 2.500 |" in text
    assert "| 70% | default | 2 | 1 | 0.750 | 1.000 | 1.000 | 0.38 | 1.00 |" in text  # mean of 0.5 and 0.25
    assert "| - | - |" in report.table(rows[2:], "fcfs")
    report.save_plot(rows, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_a_cluster_that_does_not_start_says_why(bench: ModuleType) -> None:
    helper = importlib.import_module("_cluster")
    with (
        pytest.raises(helper.ClusterError, match=r"(?s)`fastserve serve` ended:.*--policy"),
        helper.cluster("smollm2-135m-instruct", ("--policy", "nonsense")),
    ):
        pytest.fail("it started")


@pytest.mark.cluster
@pytest.mark.model
@pytest.mark.timeout(600)
def test_the_quick_run_measures_and_leaves_no_process(tmp_path: Path) -> None:
    out, temporary = tmp_path / "out", tmp_path / "tmp"
    temporary.mkdir()
    command = [sys.executable, str(BENCHMARKS / "head_of_line.py"), "--quick", "--serve-flag=--fake", "--out", str(out)]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in out.iterdir()} == {f"head_of_line.{kind}" for kind in ("json", "md", "png")}
    assert "| 92% | default | 24 |" in (out / "head_of_line.md").read_text()
    assert not list(temporary.glob("fastserve-*"))
    assert not [line for line in _command_lines() if bytes(temporary) in line]


def _command_lines() -> Iterator[bytes]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            yield path.read_bytes()
