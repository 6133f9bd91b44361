"""The simulator against a live system: the same arrivals through both, and the error of what it predicts.

`compare` takes what `fastserve bench --save-detailed` wrote of a live run and the profile that the live scheduler used;
flags of `fastserve simulate` after `--` say how the live system was configured. What a live system adds to computing is
measured on it and given to the simulator: `--alone` is a result with --max-concurrency 1, `--together` one of a full
batch of equal requests sent at once. Of them come the control time of an iteration, its part per request of the batch,
and the time that a request spends outside of the scheduler.

`run` does it all: it serves a model in one stage on this machine, makes the three runs and compares. It wants a quiet
machine.

    python benchmarks/live_vs_simulated.py run
    python benchmarks/live_vs_simulated.py run --serve-flag=--fake --serve-flag=--fake-iteration-ms=40
    python benchmarks/live_vs_simulated.py compare LIVE.json --profile P.json --alone A.json --together T.json \\
        -- --max-num-seqs=8 --policy=fcfs
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from _live_runs import LiveRuns, make_runs

from fastserve_common.load import stats
from fastserve_common.settings import SettingsError
from fastserve_scheduler.profile_file import ProfileFileError, read_profile
from fastserve_scheduler.sim.arrivals import Request
from fastserve_scheduler.sim.fleet import Fleet
from fastserve_scheduler.sim.recorder import Finished
from fastserve_scheduler.simulate import system
from fastserve_scheduler.simulate.settings import SimulateSettings

GOAL_PERCENT = 15.0
PERCENTILES = (50, 90, 95, 99)


class InputError(ValueError):
    """A sentence for the person who named the file."""


@dataclass(frozen=True, slots=True)
class Sent:
    """One completed live request; seconds since the run began."""

    start_s: float
    input_tokens: int
    output_tokens: int
    first_s: float
    latency_s: float
    gaps_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Overheads:
    """Measured on the live system, in microseconds; `request_us`: of a request outside of the scheduler."""

    turn_us: float = 0.0
    turn_job_us: float = 0.0
    request_us: float = 0.0


def read_live(path: Path) -> list[Sent]:
    """In order of sending. Raises InputError when it is no detailed result, or nothing completed."""
    try:
        result = json.loads(path.read_text())
        columns = [result[name] for name in ("start_times", "input_lens", "output_lens", "ttfts", "latencies", "itls")]
        rows = [
            Sent(start, int(num_in), int(num_out), first, latency, tuple(gaps))
            for start, num_in, num_out, first, latency, gaps, error in zip(*columns, result["errors"], strict=True)
            if not error
        ]
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is not a result of `fastserve bench --save-detailed`: {error!r}") from error
    if not rows:
        raise InputError(f"{path} has no completed request")
    return sorted(rows, key=lambda row: row.start_s)


def measure_overheads(profile_path: Path, alone: Sequence[Sent], together: Sequence[Sent]) -> Overheads:
    """What iterations took live beyond what the profile says, for one request and for a batch of them; what the first
    token of a lone request took beyond its prefill and one turn. Never below 0."""
    profile = read_profile(profile_path).profile
    one_us = max(0.0, _beyond_us(alone, 1, profile.decode_ns(1, _mean_context(alone))))
    job_us = 0.0
    if len(together) > 1:
        batch = len(together)
        batch_us = max(0.0, _beyond_us(together, batch, profile.decode_ns(batch, _mean_context(together))))
        job_us = max(0.0, (batch_us - one_us) / (batch - 1))
    first_us = [row.first_s * 1e6 - profile.prefill_ns(row.input_tokens) / 1e3 - one_us for row in alone]
    return Overheads(max(0.0, one_us - job_us), job_us, max(0.0, stats.percentile(sorted(first_us), 50)))


def _beyond_us(rows: Sequence[Sent], batch: int, decode_ns: int) -> float:
    gaps_s = sorted(gap for row in rows for gap in row.gaps_s)
    if not gaps_s:
        raise InputError(f"the run of {batch} together has answers of one token only: nothing can be measured of it")
    return stats.percentile(gaps_s, 50) * 1e6 - decode_ns / 1e3


def _mean_context(rows: Sequence[Sent]) -> int:
    return max(1, round(stats.mean([row.input_tokens + row.output_tokens / 2 for row in rows])))


def simulate(rows: Sequence[Sent], profile: Path, overheads: Overheads, flags: Sequence[str]) -> Finished:
    """The live arrivals through the simulator. Raises SettingsError."""
    measured = [
        f"--profile={profile}",
        f"--turn-us={overheads.turn_us}",
        f"--turn-job-us={overheads.turn_job_us}",
    ]
    settings = SimulateSettings.load([*measured, *flags], prog="live_vs_simulated.py")
    _, plant = system.build(settings)
    requests = [Request(round(row.start_s * 1e9), row.input_tokens, row.output_tokens) for row in rows]
    return Fleet(plant).run(requests).recorder.finished


def errors_percent(live: Sequence[float], simulated: Sequence[float]) -> dict[str, tuple[float, float, float]]:
    """Name -> (live, simulated, error in percent) of mean and percentiles."""
    one, other = sorted(live), sorted(simulated)
    pairs = {"mean": (stats.mean(one), stats.mean(other))}
    pairs |= {f"P{p}": (stats.percentile(one, p), stats.percentile(other, p)) for p in PERCENTILES}
    return {name: (a, b, 100 * (b / a - 1) if a else 0.0) for name, (a, b) in pairs.items()}


def compare(
    rows: Sequence[Sent], profile: Path, overheads: Overheads, flags: Sequence[str]
) -> dict[str, dict[str, tuple[float, float, float]]]:
    """Measure -> its errors. Raises SettingsError; InputError when the simulator refused what was served."""
    finished = simulate(rows, profile, overheads, flags)
    if len(finished) < len(rows):
        raise InputError(f"the simulated system refused {len(rows) - len(finished)} requests that the live one served")
    extra_s = overheads.request_us / 1e6
    per_token = [
        (latency + extra_s) / output for latency, output in zip(finished.latency_s(), finished.output, strict=True)
    ]
    return {
        "s/token": errors_percent([row.latency_s / row.output_tokens for row in rows], per_token),
        "TTFT s": errors_percent([row.first_s for row in rows], [first + extra_s for first in finished.first_s()]),
        "E2E s": errors_percent([row.latency_s for row in rows], [s + extra_s for s in finished.latency_s()]),
    }


def table(found: dict[str, dict[str, tuple[float, float, float]]]) -> str:
    lines = [f"{'':10}{'':6}{'live':>10}{'simulated':>11}{'error':>9}"]
    for measure, rows in found.items():
        lines += [f"{measure:10}{name:6}{a:10.4f}{b:11.4f}{error:+8.1f}%" for name, (a, b, error) in rows.items()]
    return "\n".join(lines)


def report(runs: LiveRuns, flags: Sequence[str]) -> int:
    """Prints; 0 when the mean of s/token is met within the goal, 1 when not."""
    rows = read_live(runs.live)
    overheads = Overheads()
    if runs.alone is not None:
        together = [] if runs.together is None else read_live(runs.together)
        overheads = measure_overheads(runs.profile, read_live(runs.alone), together)
    print(
        f"{len(rows)} requests; control {overheads.turn_us / 1e3:.2f} ms an iteration and"
        f" {overheads.turn_job_us / 1e3:.2f} ms a request of it, {overheads.request_us / 1e3:.1f} ms outside"
    )
    found = compare(rows, runs.profile, overheads, flags)
    print(table(found))
    _, _, error = found["s/token"]["mean"]
    print(f"mean s/token: error {error:+.1f} % (goal {GOAL_PERCENT:g} %)")
    return 0 if abs(error) <= GOAL_PERCENT else 1


def main(argv: Sequence[str]) -> int:
    own, _, flags = _split(argv)
    args = _parse(own)
    try:
        if args.command == "run":
            runs = make_runs(args)
            flags = [f"--max-num-seqs={args.max_num_seqs}", f"--policy={args.policy}", *flags]
        else:
            runs = LiveRuns(args.live, args.profile, args.alone, args.together)
        return report(runs, flags)
    except (InputError, SettingsError, ProfileFileError) as error:
        print(f"live_vs_simulated: {error}", file=sys.stderr)
        return 2


def _split(argv: Sequence[str]) -> tuple[list[str], str, list[str]]:
    cut = list(argv).index("--") if "--" in argv else len(argv)
    return list(argv[:cut]), "--", list(argv[cut + 1 :])


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("compare", help="results that are there")
    one.add_argument("live", type=Path, help="a detailed result")
    one.add_argument("--profile", type=Path, required=True, help="that the live scheduler used")
    one.add_argument("--alone", type=Path, help="a detailed result with --max-concurrency 1")
    one.add_argument("--together", type=Path, help="one of a full batch of equal requests sent at once")
    two = commands.add_parser("run", help="serve, measure, compare")
    two.add_argument("--model", default="smollm2-135m-instruct", help="as for `fastserve serve`")
    two.add_argument("--policy", default="skip-join-mlfq")
    two.add_argument("--max-num-seqs", type=int, default=8)
    two.add_argument("--num-prompts", type=int, default=60)
    two.add_argument("--rate", type=float, default=1.0, help="requests per second")
    two.add_argument("--mean-input", type=float, default=30)
    two.add_argument("--mean-output", type=float, default=30)
    two.add_argument("--max-output", type=int, default=128)
    two.add_argument("--serve-flag", action="append", default=[], help="more for `fastserve serve`, such as --fake")
    two.add_argument("--seed", type=int, default=0)
    two.add_argument("--out", type=Path, default=Path("live-vs-simulated"), help="folder for the runs")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
