"""The table of policies against workloads: what is compared with what."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def policies(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("scheduler_policies")


def row(workload: str, variant: str, seed: int, mean: float, p95: float) -> dict[str, object]:
    where = {"workload": workload, "protocol": "overload", "chunk": 512}
    return {**where, "variant": variant, "seed": seed, "mean": mean, "p95": p95}


def test_a_policy_is_compared_with_fcfs_seed_by_seed(policies: ModuleType) -> None:
    groups = policies.grouped(
        [
            row("alpaca", "fcfs", 1, 1.0, 4.0),
            row("alpaca", "fcfs", 2, 2.0, 4.0),
            row("alpaca", "las", 1, 0.5, 1.0),
            row("alpaca", "las", 2, 0.5, 3.0),
            row("alpaca", "las", 3, 9.0, 9.0),  # no run of FCFS to compare it with
            row("agents", "fcfs", 1, 1.0, 1.0),
        ]
    )
    lines = policies.summary_lines(
        {name: groups[name, "overload", "512"] for name in ("alpaca", "agents")}, ("mean", "p95")
    )
    assert lines == [
        "| mean / p95 over FCFS | alpaca (2) | agents (1) |",
        "|---|---|---|",
        "| fcfs | 1.00 / 1.00 | 1.00 / 1.00 |",
        "| las | 0.38 / 0.50 | - |",
    ]


def test_the_same_calls_come_under_every_policy(policies: ModuleType) -> None:
    counts = {
        name: len(policies.play(policies.VARIANTS[name], policies.agents(24, 4.0, 7), 7, 512))
        for name in ("fcfs", "plas", "predicted, hint 0.7")
    }
    assert len(set(counts.values())) == 1
    assert counts["fcfs"] > 24 // 8
