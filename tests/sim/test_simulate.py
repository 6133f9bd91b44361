"""`fastserve simulate`: flags to results; the same bytes for the same seed; one sentence for what cannot be."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from fastserve.bench.metrics import Outcome, Run
from fastserve.bench.result import Setup, to_result
from fastserve.bench.runner import Measured
from fastserve_scheduler.core.events import JobArrived
from fastserve_scheduler.core.profile import Profile
from fastserve_scheduler.journal_reader import read_entries, replay
from fastserve_scheduler.profiler import ProfileKey, ProfileStore
from fastserve_scheduler.settings import SchedulerSettings
from fastserve_scheduler.simulate import command
from fastserve_scheduler.simulate.settings import LIVE_ONLY, SimulateSettings

FAST = ("--lengths=alpaca-like", "--num-requests=24", "--rate=10", "--no-progress", "--max-model-len=1024")

#: Of a client that sends over a network; there is none here. ITL is counted, a date would differ between equal runs.
CLIENT_KEYS = {
    "date",
    "mean_client_lag_ms",
    "p99_client_lag_ms",
    "max_client_lag_ms",
    "client_cpu_s",
    "client_cpu_share",
    "client_cpu_us_per_token",
    "client_saturated",
}


def result_of(tmp_path: Path, *flags: str) -> dict[str, object]:
    path = tmp_path / "result.json"
    assert command.main([*FAST, *flags, f"--output={path}"]) == 0
    found = json.loads(path.read_text())
    assert isinstance(found, dict)
    return found


def test_a_result_has_the_keys_of_the_benchmark_client(tmp_path: Path) -> None:
    from datetime import UTC, datetime

    outcome = Outcome(arrival_s=[1.0, 2.0], token_counts=[1, 1], end_s=2.0, input_tokens=3, output_tokens=2)
    setup = Setup("b", "e", "m", "t", 1, 1.0, "gamma", 1.0)
    bench = to_result(setup, Measured(Run([outcome], 2.0), 0.1), datetime(2026, 1, 1, tzinfo=UTC))
    simulated = result_of(tmp_path)
    assert set(bench) - CLIENT_KEYS <= set(simulated)
    assert simulated["completed"] == 24
    rows, expected = simulated["by_output_length"], bench["by_output_length"]
    assert isinstance(rows, dict)
    assert isinstance(expected, dict)
    assert set(next(iter(rows.values()))) == set(next(iter(expected.values())))


def test_equal_seeds_write_equal_bytes(tmp_path: Path) -> None:
    texts = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        path = tmp_path / name
        assert (
            command.main(
                [*FAST, "--workload=programs", f"--seed={seed}", "--detailed", "--num-requests=8", f"--output={path}"]
            )
            == 0
        )
        texts.append(path.read_bytes())
    assert texts[0] == texts[1] != texts[2]


def test_policies_are_compared_under_the_same_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, picture = tmp_path / "results.json", tmp_path / "picture.png"
    flags = ["--compare=fcfs,srpt", "--detailed", f"--output={path}", f"--plot={picture}", "--slo=normalised:30"]
    assert command.main([*FAST, *flags]) == 0
    fcfs, srpt = json.loads(path.read_text())
    assert (fcfs["policy"], srpt["policy"]) == ("fcfs", "srpt")
    assert fcfs["start_times"] == srpt["start_times"]
    assert fcfs["input_lens"] == srpt["input_lens"]
    assert fcfs["goodput_slo_ms"] == {"normalised": 30}
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "Normalised latency" in capsys.readouterr().out


@pytest.mark.parametrize("workload", ["bursts", "diurnal", "programs"])
def test_every_kind_of_load_is_served(tmp_path: Path, workload: str) -> None:
    found = result_of(
        tmp_path, f"--workload={workload}", "--replicas=2", "--router=two-choices", "--check", "--num-requests=5"
    )
    assert found["failed"] == 0
    assert found["arrivals"] == workload


def test_the_rate_goes_in_steps_and_the_last_one_stays(tmp_path: Path) -> None:
    steps = ("--workload=steps", "--rate-step=4:1", "--rate-step=2:3", "--rate-step=1:0.5")
    found = result_of(tmp_path, *steps, "--rate=1", "--burstiness=inf", "--detailed", "--num-requests=13")
    starts_s = found["start_times"]
    assert isinstance(starts_s, list)
    gaps_s = [later - earlier for earlier, later in pairwise(starts_s)]
    assert gaps_s == pytest.approx([1.0] * 3 + [1 / 3] * 6 + [2.0] * 3)


def test_a_trace_is_played_in_its_window_at_the_rate_that_was_asked_for(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:00:{second:02d}.0000000,{100 + second},8" for second in range(50)]
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows) + "\n")
    found = result_of(
        tmp_path,
        f"--trace={trace}",
        "--trace-start=10",
        "--trace-seconds=20",
        "--detailed",
        "--rate=2",
        "--max-input-len=125",
    )
    assert found["input_lens"] == [min(110 + n, 125) for n in range(20)]
    assert found["start_times"] == pytest.approx([n * 0.5 for n in range(20)])


def test_limits_tell_nothing_unless_they_are_asked_to(tmp_path: Path) -> None:
    outputs = []
    for flags in ((), ("--limits=exact",), ("--hint-error=0.5",)):
        found = result_of(tmp_path, *flags, f"--record={tmp_path / 'journal'}", "--detailed", "--num-requests=8")
        outputs.append(found["output_lens"])
        events = [entry.event for entry in read_entries(tmp_path / "journal")]
        arrived = [event for event in events if isinstance(event, JobArrived)]
        exact = [event.max_output_tokens for event in arrived] == found["output_lens"]
        assert exact is ("--limits=exact" in flags)
        assert all(event.expected_output_tokens > 0 for event in arrived) is ("--hint-error=0.5" in flags)
    assert outputs[0] == outputs[1] == outputs[2]


def test_a_share_of_capacity_is_measured_first(tmp_path: Path) -> None:
    flags = [flag for flag in FAST if not flag.startswith("--rate")]
    path = tmp_path / "r"
    assert command.main([*flags, "--load-share=0.5", "--lengths=fixed", "--output-len=4", f"--output={path}"]) == 0
    found = json.loads(path.read_text())
    assert found["request_rate"] == pytest.approx(found["capacity"] / 2)
    assert found["capacity"] > 1


def test_a_measured_profile_takes_the_place_of_a_device(tmp_path: Path) -> None:
    profile = Profile(((16, 10_000_000), (512, 90_000_000)), ((1, 16, 5_000_000), (16, 16, 6_000_000)))
    path = ProfileStore(tmp_path).save(ProfileKey("finger", "float32", "cpu", 2), profile)
    found = result_of(
        tmp_path, f"--profile={path}", "--pp=2", "--stage-share=0.6", "--stage-share=0.4", "--max-model-len=512"
    )
    assert found["device"] == "profile"
    assert found["model_id"] == "finger"
    shares = found["stage_utilisation"]
    assert isinstance(shares, list)
    assert shares[0] / shares[1] == pytest.approx(1.5, rel=1e-3)


def test_what_was_simulated_can_be_replayed(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    result_of(tmp_path, f"--record={journal}", "--kv-tokens=1024", "--host-kv-tokens=4096")
    replayed = replay(journal)
    assert replayed.divergence is None
    assert replayed.core.snapshot().finished == 24


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--model=gpt-5"], "--model: must be one of opt-2.7b"),
        (["--policy=fastest"], "--policy: must be one of"),
        (["--compare=fcfs,fastest"], "--compare: must be one of"),
        (["--slo=ttft"], "--slo: expected NAME:MS"),
        (["--rate=1", "--load-share=1"], "--rate and --load-share exclude each other"),
        (["--model=opt-175b"], "--device, --tp, --pp: opt-175b does not fit 1 x a100-80"),
        (["--tp=3"], "--device, --tp, --pp: opt-13b has 40 heads"),
        (["--profile=missing"], "--profile: cannot read missing"),
        (["--trace=missing"], "--trace: cannot read missing"),
        (["--kv-memory=1KiB"], "--kv-memory: holds 0 tokens"),
        (["--stage-share=1"], "--stage-share: stages of a --profile only"),
        (["--workload=steps"], "--workload steps and --rate-step need each other"),
        (["--rate-step=10:2"], "--workload steps and --rate-step need each other"),
        (["--workload=steps", "--rate-step=10"], "--rate-step: expected SECONDS:FACTOR"),
        (["--workload=steps", "--rate-step=10:-1"], "--rate-step: expected SECONDS:FACTOR"),
        (["--workload=steps", "--rate-step=10:0"], "--rate-step: the last factor stays and must be above 0"),
        (["--router=random"], "--router: must be one of"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--rate=1", "--num-requests=1", "--output=/no/such/folder/x"], "--output: cannot write"),
    ],
)
def test_what_cannot_be_is_one_sentence_that_names_the_flag(
    flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(flags) == 2
    error = capsys.readouterr().err
    assert error.startswith("fastserve: ")
    assert sentence in error
    assert error.count("\n") == 1


def test_every_setting_of_the_scheduler_is_a_flag_here_or_means_nothing_here() -> None:
    assert set(SchedulerSettings.model_fields) >= LIVE_ONLY
    shown = SimulateSettings.parser("x").format_help()
    for name in SchedulerSettings.model_fields:
        assert (f"--{name.replace('_', '-')} " in shown or f"--{name.replace('_', '-')}," in shown) is (
            name not in LIVE_ONLY
        ), name


def test_the_command_line_reaches_it() -> None:
    argv = [
        sys.executable,
        "-m",
        "fastserve.cli",
        "simulate",
        *FAST,
        "--lengths=fixed",
        "--output-len=2",
        "--num-requests=5",
    ]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Completed requests" in done.stdout
    wrong = subprocess.run([*argv, "--model=none"], capture_output=True, text=True, check=False)
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
