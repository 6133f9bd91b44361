"""The studies' commands, in their smallest form: they run, go on where they were, and leave what they promise."""

import importlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

BEYOND = "benchmarks.beyond"
STUDIES = ("alpha", "attention", "bursts", "enst", "link", "mixing", "overload", "profile_error", "settings", "stable")


def run(study: str, *arguments: str) -> int:
    """As `python -m benchmarks.beyond.STUDY ... --quick` does."""
    module = importlib.import_module(f"{BEYOND}.{study}")
    return int(importlib.import_module(f"{BEYOND}.study").main(module.STUDY, [*arguments, "--quick"]))


PROMISED = {
    "alpha": {"1.7", "3"},
    "attention": {"MHA", "GQA", "MQA"},
    "bursts": {"2x for 10 s", "3x for 10 s, by class"},
    "enst": {"alpha 10 s", "paper"},
    "link": {"GB/s by ratio", "alpha 0.3 s, 4", "alpha 10 s, 0.1", "recompute", "defer"},
    "mixing": {"2.2", "3"},
    "overload": {"1.2x for 60 s", "1.5x for 60 s, by class", "2x for 60 s"},
    "profile_error": {"short prompts", "long prompts"},
    "stable": {"shares", "alpha"},
    "settings": {"first quantum", "ratio", "queues", "batch 4", "batch 64"},
}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all: studies share runs."""
    return tmp_path_factory.mktemp("studies")


@pytest.mark.parametrize("study", STUDIES)
def test_a_study_leaves_numbers_tables_and_a_picture(study: str, out: Path) -> None:
    assert run(study, f"--out={out}", "--seeds=1") == 0
    values = json.loads((out / f"{study}.json").read_text())
    assert values["study"] == study
    assert set(values) >= PROMISED[study]
    tables = (out / f"{study}.md").read_text()
    assert tables.startswith("**")
    assert "(1)" in tables
    assert "nan" not in tables
    assert study == "enst" or (out / f"{study}.png").stat().st_size > 5_000


def test_the_statements_have_rates_and_likeness(out: Path) -> None:
    assert run("statements", f"--out={out}", "--only", "fcfs", "orders2", "promoted") == 0
    values = json.loads((out / "statements.json").read_text())
    assert len(values["rate at SLO"]["fcfs, mean"]) == 2
    assert len(values["rank correlation with the paper's order"]["round robin @ 2"]) == 2
    assert all(0 <= share <= 1 for shares in values["promoted"].values() for share in shares)
    assert values["orders2"]["srpt @ 2"]["mean"][0] > 0


def test_what_is_there_is_not_simulated_again(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (f"--out={out}", "--seeds=1")
    assert run("alpha", *arguments) == 0
    monkeypatch.setattr(f"{BEYOND}.study.measure", lambda case, traces: pytest.fail("simulated again"))
    assert run("alpha", *arguments) == 0


def test_a_command_whose_time_is_up_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (f"--out={tmp_path}", "--seconds=-1")
    assert run("alpha", *arguments) == 1
    assert "24 runs are missing" in capsys.readouterr().out
    assert run("alpha", *arguments, "--partial") == 0
    assert "(0)" in (tmp_path / "alpha.md").read_text()


def test_a_share_of_capacity_is_a_rate_of_its_own_set_up() -> None:
    case = importlib.import_module(f"{BEYOND}.case")
    one = case.Case(load="short-answers", share=0.5, batch=2)
    rates = [case.with_rate(each).rate for each in (one, replace(one, share=0.9), replace(one, batch=4))]
    assert rates[1] == pytest.approx(rates[0] * 1.8)
    assert rates[2] > 1.1 * rates[0]
    assert case.with_rate(replace(one, policy="srpt", share=0.5)).rate == rates[0], "orders are compared at one rate"
    with pytest.raises(ValueError, match="not at a share"):
        case.with_rate(case.Case(load="azure-code", share=0.5))
