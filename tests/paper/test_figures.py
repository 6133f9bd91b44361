"""Every figure's command runs in a tiny size and leaves what it promises; what is measured is not measured again."""

import importlib
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]

KEYS = {
    "fig01": {"shares", "seeds"},
    "fig05": {"iterations_ms"},
    "fig07": {"averages", "joined"},
    "fig08": {"peak_gib", "seeds"},
    "fig11": {"slo_s", "OPT-13B sharegpt", "OPT-175B alpaca"},
    "fig12": {"slo_s", "OPT-66B sharegpt"},
    "fig13": {"attainment", "rates"},
    "fig14": {"mean", "p95"},
    "fig15": {"alpha 10 s", "alpha 0.3 s", "limit_s"},
    "stable": {"loads", "Chunked prefill", "KV policies (figure 15)"},
    "fairness": {"quartiles_s", "rate"},
    "gqa": {"Llama-3-8B, sharegpt", "Llama-3-8B, alpaca"},
    "large_batch": {"batches of 64", "batches of 128"},
    "chunked_prefill": {"OPT-13B, ShareGPT"},
}
WITHOUT_PLOT = {"fig07"}
#: One of each kind of figure runs always, the others with the full suite.
ALWAYS = {"fig05", "fig07", "fig11", "fig15", "stable", "fairness"}
AUTHORS = {"x": [1, 2, 6], "y": [0.1, 0.2, 0.6]}


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(ROOT))


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all: figures share points."""
    return tmp_path_factory.mktemp("paper")


def load(name: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.paper.{name}")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ALWAYS else [pytest.mark.full]) for name in KEYS]
)
def test_a_figure_runs_and_leaves_its_files(name: str, out: Path) -> None:
    assert load("figure").main(load(name).FIGURE, [f"--out={out}", "--quick", "--processes=1"]) == 0
    values = json.loads((out / f"{name}.json").read_text())
    assert values["figure"] == name
    assert KEYS[name] <= values.keys()
    assert "| --- |" in (out / f"{name}.md").read_text()
    if name not in WITHOUT_PLOT:
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_figure_7_has_the_papers_averages(tmp_path: Path) -> None:
    assert load("figure").main(load("fig07").FIGURE, [f"--out={tmp_path}"]) == 0
    averages = json.loads((tmp_path / "fig07.json").read_text())["averages"]
    found = [averages[policy]["A"]["average"] for policy in ("fcfs", "naive-mlfq", "skip-join-mlfq", "srpt")]
    assert found == pytest.approx([4.23, 5.0, 3.3, 3.0], abs=0.005)


def test_figure_5_has_the_papers_times() -> None:
    fig05 = load("fig05")
    for prompt, (first_ms, later_ms) in fig05.PAPER_MS.items():
        times = fig05.iterations_ms(fig05.OPT_2_7B_PAPER, prompt)
        assert times == pytest.approx([first_ms, later_ms, later_ms, later_ms], rel=0.01)


def test_time_that_is_up_stops_and_a_second_call_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figure, fairness = load("figure"), load("fairness").FIGURE
    arguments = [f"--out={tmp_path}", "--quick", "--processes=1"]
    assert figure.main(fairness, [*arguments, "--seconds=-1"]) == 1
    assert "5 of 5 points are missing" in capsys.readouterr().out
    assert figure.main(fairness, [*arguments, "--seconds=-1", "--partial"]) == 1
    assert not (tmp_path / "fairness.json").exists()
    assert figure.main(fairness, arguments) == 0
    lines = (tmp_path / "points.jsonl").read_text().splitlines()
    assert figure.main(fairness, [*arguments, "--seconds=-1"]) == 0
    assert (tmp_path / "points.jsonl").read_text().splitlines() == lines


def test_a_partial_report_takes_the_seeds_that_are_complete(tmp_path: Path) -> None:
    points, fairness = load("points"), load("fairness")
    options = load("figure").parse("fairness", [f"--out={tmp_path}", "--quick", "--seeds=2"])
    store = points.Store(tmp_path / "points.jsonl")
    assert points.run_all(fairness.at(options, 2), store, processes=1, seconds=60) == 0
    assert fairness.report(options, store).values["seeds"] == [2]


def test_two_processes_find_what_one_finds(tmp_path: Path) -> None:
    points = load("points")
    wanted = [points.Point("opt-13b", order, "alpaca", 8.0, 1, 12) for order in ("fcfs", "paper")]
    stores = {}
    for processes in (1, 2):
        store = points.Store(tmp_path / f"{processes}.jsonl")
        assert points.run_all(wanted, store, processes=processes, seconds=60) == 0
        stores[processes] = [store.number(point, "mean_normalised_latency") for point in wanted]
    assert stores[1] == stores[2]


def test_the_authors_points_are_drawn_when_they_are_there(tmp_path: Path) -> None:
    curves = {"FastServe-FCFS": AUTHORS, "FastServe": AUTHORS}
    numbers = {"fig12_sharegpt_p95": dict.fromkeys(("opt13b", "opt66b", "opt175b"), curves)}
    (tmp_path / "paper_figure_numbers.json").write_text(json.dumps(numbers))
    arguments = [f"--out={tmp_path}", f"--workloads={tmp_path}", "--quick", "--processes=1"]
    assert load("figure").main(load("fig12").FIGURE, arguments) == 0
    first_row = (tmp_path / "fig12.md").read_text().splitlines()[4]
    assert first_row.endswith("| 3.00 | 3.00 | 1.00 |")


def test_a_long_run_leaves_its_ends_out_and_a_saturated_one_has_a_capacity() -> None:
    points = load("points")
    whole = points.Point("opt-13b", "fcfs", "alpaca", 8.0, 1, 40)
    inner = points.measure(replace(whole, window=True))
    assert inner["mean_normalised_latency"] != points.measure(whole)["mean_normalised_latency"]
    saturated = points.measure(replace(whole, rate=0.0))
    assert saturated["capacity"] > 2
    assert set(saturated["attainment"]) == {"5", "10", "20"}


def test_goodput_counts_both_phases() -> None:
    """At light load everybody is within 20 times of an empty system; when all come at once few are within 5."""
    points = load("points")
    light = points.measure(points.Point("opt-13b", "fcfs", "fixed", 0.2, 1, 12))
    crowd = points.measure(points.Point("opt-13b", "fcfs", "fixed", 0.0, 1, 48))
    assert light["attainment"]["20"] == 1.0
    assert crowd["attainment"]["5"] < 0.5


def test_equal_jobs_have_one_capacity_however_they_are_batched() -> None:
    capacity = load("capacity")
    together = capacity.full_batches("fixed", 16)
    assert capacity.batch_by_batch("fixed", 16) == pytest.approx(together)
    assert capacity.batch_by_batch("sharegpt", 16) < 0.6 * capacity.full_batches("sharegpt", 16)
    assert capacity.full_batches("fixed", 1) < together / 8


def test_the_authors_points_are_sorted_and_the_first_of_two_counts() -> None:
    assert load("figure").rising({"x": [3, 1, 1], "y": [0.3, 0.1, 0.9]}) == {"x": [1, 3], "y": [0.1, 0.3]}
