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
        name: len(policies.play(policies.VARIANTS[name], policies.agents(3, 0.5, 7), 7, 512).jobs)
        for name in ("fcfs", "plas", "predicted, hint 0.7")
    }
    assert len(set(counts.values())) == 1
    assert counts["fcfs"] > 3


def test_a_program_lasts_from_its_first_call_to_its_last_answer(policies: ModuleType) -> None:
    """Alone with its thoughts of a second, and no longer than all of its calls and pauses."""
    played = policies.play(policies.VARIANTS["fcfs"], policies.agents(2, 0.01, 7), 7, 512)
    jobs, programs = played.jobs, played.programs
    assert len(programs) == 2
    assert [first for first, _ in programs] == sorted(first for first, _ in programs)
    assert sorted(end for _, end in programs)[-1] == max(jobs.finished)
    assert sum(end - first for first, end in programs) > sum(jobs.latency_s()) * 1e9, "pauses count as well"


def test_requests_that_belong_to_no_program_are_programs(policies: ModuleType) -> None:
    played = policies.play(policies.VARIANTS["fcfs"], policies.chat(policies.ALPACA, 1, 5, 1.0, 7), 7, 512)
    found = policies.measured(played.jobs, [(end - first) / 1e9 for first, end in played.programs])
    assert found.program == pytest.approx(found.jct)


def test_capacity_is_that_of_the_very_requests(policies: ModuleType, tmp_path: Path) -> None:
    """All at once they end about when capacity says; agents are counted in programs."""
    served = policies.capacity(tmp_path, "alpaca", 512, 300, 3)
    played = policies.play(policies.VARIANTS["fcfs"], policies.WORKLOADS["alpaca"](tmp_path, 300, 1e6, 3), 3, 512)
    assert served * max(played.jobs.finished) / 1e9 == pytest.approx(300, rel=0.5)
    programs = policies.capacity(tmp_path, "agents", 512, 40, 3)
    assert programs < served / 2
