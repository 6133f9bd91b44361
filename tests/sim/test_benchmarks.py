"""The scripts around the simulator: measured overheads are recovered, and a wrong prediction is said to be wrong."""

import importlib
import itertools
import json
import random
from pathlib import Path
from types import ModuleType

import pytest

from fastserve_scheduler.core.config import CoreConfig
from fastserve_scheduler.core.profile import Profile
from fastserve_scheduler.profiler import ProfileKey, ProfileStore
from fastserve_scheduler.sim.arrivals import Request, constant, independent
from fastserve_scheduler.sim.fleet import Fleet, Plant
from fastserve_scheduler.sim.measured import ProfileCost
from fastserve_scheduler.sim.recorder import Finished
from fastserve_scheduler.sim.replica import Control

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MS = 1_000_000
PROFILE = Profile(
    ((16, 60 * MS), (128, 300 * MS), (512, 1400 * MS)),
    ((1, 16, 40 * MS), (1, 512, 44 * MS), (8, 16, 56 * MS), (8, 512, 80 * MS)),
)
CONTROL = Control(turn_ns=3 * MS, turn_job_ns=MS // 2)
REQUEST_S = 0.02


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("live_vs_simulated")


def played(requests: list[Request], batch: int = 8) -> Finished:
    """A system that is known: these times, and control that no profile knows of."""
    config = CoreConfig(1, 16, batch, 2048, 513, prefill_chunk_tokens=512)
    plant = Plant(config, PROFILE, ProfileCost(PROFILE), 4096, control=CONTROL)
    return Fleet(plant).run(requests).recorder.finished


def write_result(path: Path, rows: Finished) -> Path:
    """As `fastserve bench --save-detailed` would of that system, seen from outside."""
    gaps = rows.token_gap_s()
    result = {
        "start_times": [at_ns / 1e9 for at_ns in rows.arrived],
        "input_lens": list(rows.prompt),
        "output_lens": list(rows.output),
        "ttfts": [first + REQUEST_S for first in rows.first_s()],
        "latencies": [latency + REQUEST_S for latency in rows.latency_s()],
        "itls": [[gap] * (output - 1) for gap, output in zip(gaps, rows.output, strict=True)],
        "errors": ["" for _ in gaps],
    }
    path.write_text(json.dumps(result))
    return path


def files(tmp_path: Path) -> list[str]:
    def draw(rng: random.Random) -> tuple[int, int]:
        return rng.randrange(8, 100), rng.randrange(2, 60)

    live = played(list(itertools.islice(independent(constant(2.0), draw, 1), 60)))
    alone = played([Request(round(n * 60e9), 48, 48) for n in range(3)])
    together = played([Request(0, 48, 48) for _ in range(8)])
    profile = ProfileStore(tmp_path).save(ProfileKey("finger", "float32", "cpu", 1), PROFILE)
    return [
        str(write_result(tmp_path / "live.json", live)),
        f"--profile={profile}",
        f"--alone={write_result(tmp_path / 'alone.json', alone)}",
        f"--together={write_result(tmp_path / 'together.json', together)}",
    ]


def test_overheads_that_are_measured_make_the_prediction_right(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(["compare", *files(tmp_path), "--", "--max-num-seqs=8"]) == 0
    said = capsys.readouterr().out
    head = said.splitlines()[0].replace(",", "").split()
    assert head[:2] == ["60", "requests;"]
    measured_ms = [float(word) for word, unit in itertools.pairwise(head) if unit == "ms"]
    assert measured_ms == pytest.approx([3.0, 0.5, 20.0], rel=0.08)
    mean = next(line for line in said.splitlines() if line.startswith("s/token") and "mean" in line)
    assert abs(float(mean.split()[-1].rstrip("%"))) < 3


def test_a_prediction_that_is_off_fails(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    live, profile, *_ = files(tmp_path)
    assert script.main(["compare", live, profile, "--", "--max-num-seqs=1"]) == 1
    assert "(goal 15 %)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"itls": None}, "is not a result of"),
        ({"errors": ["x"] * 60}, "has no completed request"),
        ({"input_lens": [4000] * 60}, "refused 60 requests"),
    ],
)
def test_what_cannot_be_compared_is_said_in_a_sentence(
    script: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, object],
    sentence: str,
) -> None:
    live, profile, *_ = files(tmp_path)
    result = json.loads(Path(live).read_text()) | change
    Path(live).write_text(json.dumps(result))
    assert script.main(["compare", live, profile]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


def test_the_speed_benchmark_times_the_core_alone_with_the_same_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    speed = importlib.import_module("simulator_speed")
    for policy in ("fcfs", "skip-join-mlfq"):
        whole_us, core_us = speed.measure(speed.Case(policy, batch=4, waiting=8, iterations=40))
        assert whole_us > 0
        assert core_us > 0
