"""Policies against workloads, paired by arrivals: the numbers of docs/adr/0015.

OPT-13B on one A100 (DistServe's fitted times), 16 jobs a batch, ample KV memory. Two protocols: `overload` (the
paper), 400 jobs at 1.3 times the capacity with every job counted; and longer runs at 70, 85, 92 and 97 % of it with the
first 15 and the last 10 % of the jobs dropped. Capacity is what first come, first served completes of the very same
requests when all are there from the start. Callers name no limit; a hint is the true length times exp(N(0, sigma)).

`run` appends one line of JSON per run to --out and skips what is there, so that a table can be made in pieces; `table`
prints it. The Azure traces are read from --data (github.com/Azure/AzurePublicDataset, CC-BY).

    python benchmarks/scheduler_policies.py run --data DIR --out runs.jsonl --workloads sharegpt --seeds 1 2 3
    python benchmarks/scheduler_policies.py table --out runs.jsonl
    python benchmarks/scheduler_policies.py summary --out runs.jsonl

`summary` has a line per policy and a column per workload: numbers (--columns) over those of FCFS.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import islice
from pathlib import Path

from fastserve_common.load.lengths import ALPACA, SHAREGPT_ARTIFACT, LengthModel
from fastserve_common.load.traces import read_rows
from fastserve_scheduler.core import CoreConfig, MlfqConfig
from fastserve_scheduler.sim.arrivals import Request, constant, cut, independent, lengths_of
from fastserve_scheduler.sim.capacity import served_of
from fastserve_scheduler.sim.cost import OPT_13B_A100
from fastserve_scheduler.sim.fleet import Fleet, FollowUp, Plant
from fastserve_scheduler.sim.programs import Programs
from fastserve_scheduler.sim.recorder import Finished

BATCH = 16
MODEL_LEN = 3072
LONGEST_PROMPT = 2048
BLOCKS = 1 << 17
LOADS = {"overload": 1.3, "70%": 0.7, "85%": 0.85, "92%": 0.92, "97%": 0.97}
AT_ONCE = 1e6
"""Requests per second."""

T_975 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}
"""Student's t for a two-sided 95 % interval, by degrees of freedom."""


@dataclass(frozen=True)
class Variant:
    """`sigma`: spread of the hints' error; None: no hints."""

    policy: str
    sigma: float | None = None
    mlfq: MlfqConfig = field(default_factory=MlfqConfig)


VARIANTS = {
    "fcfs": Variant("fcfs"),
    "srpt (oracle)": Variant("srpt"),
    "paper": Variant("skip-join-mlfq", mlfq=MlfqConfig(alpha_ns=300_000_000)),
    "skip-join-mlfq": Variant("skip-join-mlfq"),
    "by share": Variant("skip-join-mlfq", mlfq=MlfqConfig(charge="share")),
    "by share, top": Variant("skip-join-mlfq", mlfq=MlfqConfig(charge="share", after_prefill="top")),
    "8 rounds": Variant("skip-join-mlfq", mlfq=MlfqConfig(alpha_ns=1_000_000, alpha_rounds=8, promotion="return")),
    "las": Variant("las"),
    "plas": Variant("plas"),
    "slack": Variant("slack"),
    "edf": Variant("edf"),
    "sjf": Variant("sjf"),
    "sjf, hint 0.7": Variant("sjf", 0.7),
    "predicted": Variant("predicted"),
    "predicted, hint 0.3": Variant("predicted", 0.3),
    "predicted, hint 0.7": Variant("predicted", 0.7),
    "predicted, hint 1.2": Variant("predicted", 1.2),
}


@dataclass(frozen=True)
class Load:
    """`requests` come by themselves, what `follow_up` says when one is answered."""

    requests: list[Request]
    follow_up: FollowUp | None = None


def chat(model: LengthModel, burstiness: float, num_jobs: int, rate: float, seed: int) -> Load:
    draw = lengths_of(model, LONGEST_PROMPT, MODEL_LEN)
    return Load(list(islice(independent(constant(rate), draw, seed, burstiness), num_jobs)))


@cache
def _rows(path: Path) -> list[tuple[float, int, int]]:
    return [(row.time_s, row.input_tokens, row.output_tokens) for row in read_rows("azure", path)]


def azure(path: Path, num_jobs: int, rate: float, seed: int) -> Load:
    """A window of the trace, its time stretched to the rate."""
    rows = _rows(path)
    begin = random.Random(seed).randrange(len(rows) - num_jobs)
    window = rows[begin : begin + num_jobs]
    factor = num_jobs / rate / (window[-1][0] - window[0][0])
    return Load(
        [
            Request(round((at_s - window[0][0]) * factor * 1e9), *cut(prompt, output, LONGEST_PROMPT, MODEL_LEN))
            for at_s, prompt, output in window
        ]
    )


def agents(num_jobs: int, rate: float, seed: int) -> Load:
    """Programs of eight calls on average; each call has what was said before in its prompt. `num_jobs` programs."""
    draw = lengths_of(ALPACA, LONGEST_PROMPT, MODEL_LEN)
    programs = Programs(constant(rate), draw, seed, mean_calls=8, max_total=2048)
    return Load(list(islice(programs.requests(), num_jobs)), programs.after)


Workload = Callable[[Path, int, float, int], Load]

WORKLOADS: dict[str, Workload] = {
    "sharegpt": lambda data, jobs, rate, seed: chat(SHAREGPT_ARTIFACT, 1, jobs, rate, seed),
    "alpaca": lambda data, jobs, rate, seed: chat(ALPACA, 1, jobs, rate, seed),
    "azure conv": lambda data, *rest: azure(data / "AzureLLMInferenceTrace_conv.csv.gz", *rest),
    "azure code": lambda data, *rest: azure(data / "AzureLLMInferenceTrace_code.csv.gz", *rest),
    "bursts": lambda data, jobs, rate, seed: chat(SHAREGPT_ARTIFACT, 1 / 16, jobs, rate, seed),
    "agents": lambda data, *rest: agents(*rest),
}
OVERLOAD_JOBS = {name: 400 for name in WORKLOADS} | {"agents": 200}
STABLE_JOBS = {"sharegpt": 800, "alpaca": 2000, "azure conv": 1000, "azure code": 2000, "bursts": 800, "agents": 400}
"""Requests of a run, or programs."""


@dataclass(frozen=True)
class Played:
    """`programs`: (ns of arrival of its first call, ns of the end of its last) by the order of arrival; a request that
    belongs to none is one of its own."""

    jobs: Finished
    programs: list[tuple[int, int]]


def plant(variant: Variant, chunk: int) -> Plant:
    config = CoreConfig(
        num_stages=1,
        block_size=16,
        max_batch_size=BATCH,
        max_batch_tokens=MODEL_LEN,
        max_model_len=MODEL_LEN,
        prefill_chunk_tokens=chunk,
        max_waiting_jobs=1 << 20,
        max_waiting_tokens=1 << 40,
        policy=variant.policy,
        mlfq=variant.mlfq,
    )
    return Plant(config, OPT_13B_A100.profile(MODEL_LEN, BATCH), OPT_13B_A100, BLOCKS)


def play(variant: Variant, load: Load, seed: int, chunk: int) -> Played:
    follow_up = load.follow_up
    began: dict[str, int] = {}
    programs: list[tuple[int, int]] = []

    def hinted(request: Request) -> Request:
        """With the caller's guess, the same under every policy."""
        hint = 0
        if variant.sigma is not None:
            whose = f"{seed}:{request.program or request.at_ns}:{request.call}"
            hint = max(1, round(request.output_tokens * math.exp(random.Random(whose).gauss(0, variant.sigma))))
        limit = MODEL_LEN - request.prompt_tokens
        return replace(request, max_output_tokens=limit, expected_output_tokens=hint)

    def following(request: Request, now_ns: int) -> Request | None:
        first_ns = began.setdefault(request.program, request.at_ns) if request.program else request.at_ns
        then = follow_up(request, now_ns) if follow_up else None
        if then is None:
            programs.append((first_ns, now_ns))
        return hinted(then) if then else None

    outcome = Fleet(plant(variant, chunk)).run(map(hinted, load.requests), follow_up=following)
    return Played(outcome.recorder.finished, sorted(programs))


@cache
def capacity(data: Path, workload: str, chunk: int, num_jobs: int, seed: int) -> float:
    """Requests, or programs, per second when those of this seed all come at once, under first come, first served."""
    fcfs = VARIANTS["fcfs"]
    played = play(fcfs, WORKLOADS[workload](data, num_jobs, AT_ONCE, seed), seed, chunk)
    lengths = zip(played.jobs.prompt, played.jobs.output, strict=True)
    return served_of(plant(fcfs, chunk), played.jobs, lengths) * len(played.programs) / len(played.jobs)


@dataclass(frozen=True)
class Measured:
    """Seconds: latency per output token (mean, P95, P99), completion (mean, P99), first token (mean), longest gap;
    completion of whole programs (mean, P95)."""

    mean: float
    p95: float
    p99: float
    jct: float
    jct99: float
    ttft: float
    gap: float
    program: float
    program95: float


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def measured(jobs: Finished, programs_s: Sequence[float]) -> Measured:
    per_token, whole = jobs.per_token_s(), jobs.latency_s()
    return Measured(
        sum(per_token) / len(jobs),
        quantile(per_token, 0.95),
        quantile(per_token, 0.99),
        sum(whole) / len(jobs),
        quantile(whole, 0.99),
        sum(jobs.first_s()) / len(jobs),
        max(jobs.longest_waits_s()),
        sum(programs_s) / len(programs_s),
        quantile(programs_s, 0.95),
    )


def one(options: argparse.Namespace, workload: str, protocol: str, seed: int, name: str) -> Measured:
    usual = OVERLOAD_JOBS if protocol == "overload" else STABLE_JOBS
    num_jobs = options.jobs or usual[workload]
    rate = capacity(options.data, workload, options.chunk, num_jobs, seed) * LOADS[protocol]
    played = play(VARIANTS[name], WORKLOADS[workload](options.data, num_jobs, rate, seed), seed, options.chunk)
    jobs, programs = played.jobs, played.programs
    if protocol != "overload":
        counted = inner(len(jobs))
        jobs = jobs.chosen(row for row, number in enumerate(jobs.number) if number in counted)
        programs = [programs[index] for index in inner(len(programs))]
    return measured(jobs, [(end_ns - first_ns) / 1e9 for first_ns, end_ns in programs])


def inner(total: int) -> range:
    """Without the first 15 and the last 10 %."""
    return range(total * 15 // 100, total * 9 // 10)


def labels(options: argparse.Namespace) -> Iterator[tuple[str, str, int, str]]:
    for workload in options.workloads:
        for protocol in options.protocols:
            for seed in options.seeds:
                for name in options.variants:
                    yield workload, protocol, seed, name


def run(options: argparse.Namespace) -> None:
    done = {_key(row) for row in _lines(options.out)}
    until_s = time.monotonic() + options.seconds
    for label in labels(options):
        row = dict(zip(("workload", "protocol", "seed", "variant"), label, strict=True), chunk=options.chunk)
        if _key(row) in done:
            continue
        if time.monotonic() > until_s:
            print("time is up; run it again to go on")
            return
        result = one(options, *label)
        with options.out.open("a") as file:
            file.write(json.dumps({**row, **asdict(result)}) + "\n")


def _lines(out: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def _key(row: dict[str, object]) -> tuple[object, ...]:
    return tuple(row[name] for name in ("workload", "protocol", "seed", "variant", "chunk"))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half-width of its 95 % interval."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, math.nan
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
    return mean, T_975.get(len(values) - 1, 2.2) * deviation / math.sqrt(len(values))


#: Numbers by variant and seed.
Group = dict[str, dict[int, dict[str, float]]]
#: Groups by workload, protocol and chunk.
Groups = dict[tuple[str, str, str], Group]


def grouped(lines: Iterable[dict[str, object]]) -> Groups:
    groups: Groups = {}
    for row in lines:
        group = groups.setdefault((str(row["workload"]), str(row["protocol"]), str(row["chunk"])), {})
        numbers = {name: value for name, value in row.items() if isinstance(value, float)}
        group.setdefault(str(row["variant"]), {})[int(str(row["seed"]))] = numbers
    return groups


def table(options: argparse.Namespace) -> None:
    for (workload, protocol, chunk), group in sorted(grouped(_lines(options.out)).items(), key=str):
        print(f"\n**{workload}, {protocol}** (chunk {chunk}, {len(group['fcfs'])} seeds)\n")
        _print(group)


def _print(group: Group) -> None:
    columns = list(Measured.__dataclass_fields__)
    print(f"| | {' | '.join(columns)} | mean / fcfs | worst seed |")
    print("|---" * (len(columns) + 3) + "|")
    for name in (name for name in VARIANTS if name in group):
        rows = group[name]
        means = " | ".join(f"{sum(row[column] for row in rows.values()) / len(rows):.4g}" for column in columns)
        ratios = [row["mean"] / group["fcfs"][seed]["mean"] for seed, row in rows.items()]
        ratio, half = interval(ratios)
        print(f"| {name} | {means} | {ratio:.3f}±{half:.3f} | {max(ratios):.3f} |")


def summary(options: argparse.Namespace) -> None:
    groups = grouped(_lines(options.out))
    for protocol, chunk in sorted({(protocol, chunk) for _, protocol, chunk in groups}):
        found = {
            workload: groups[workload, protocol, chunk]
            for workload in WORKLOADS
            if (workload, protocol, chunk) in groups
        }
        print(f"\n**{protocol}** (chunk {chunk})\n")
        print("\n".join(summary_lines(found, options.columns)))


def summary_lines(found: dict[str, Group], columns: Sequence[str]) -> list[str]:
    """A table of paired ratios to FCFS, averaged over the seeds that both have; the number of seeds stands above."""
    titles = [f"{workload} ({len(group['fcfs'])})" for workload, group in found.items()]
    lines = [f"| {' / '.join(columns)} over FCFS | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    for name in VARIANTS:
        cells = [_over_fcfs(group, name, columns) for group in found.values()]
        if any(cells):
            lines.append(f"| {name} | {' | '.join(cell or '-' for cell in cells)} |")
    return lines


def _over_fcfs(group: Group, name: str, columns: Sequence[str]) -> str:
    """Empty while there is no seed."""
    pairs = [(row, group["fcfs"][seed]) for seed, row in group.get(name, {}).items() if seed in group["fcfs"]]
    ratios = [[row[column] / base[column] for row, base in pairs] for column in columns]
    return " / ".join(f"{interval(each)[0]:.2f}" for each in ratios) if pairs else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    running = commands.add_parser("run")
    running.add_argument("--data", type=Path, required=True)
    running.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    running.add_argument("--protocols", nargs="+", default=["overload", "92%"], choices=LOADS)
    running.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    running.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    running.add_argument("--jobs", type=int, default=0, help="jobs of a run; 0: as the protocol says")
    running.add_argument(
        "--chunk", type=int, default=512, help="prompt tokens beside a full batch of decodes; 0: whole"
    )
    running.add_argument("--seconds", type=float, default=math.inf, help="begin no run later than this")
    running.set_defaults(do=run)
    tabling = commands.add_parser("table")
    tabling.set_defaults(do=table)
    summing = commands.add_parser("summary")
    summing.add_argument("--columns", nargs="+", default=["mean", "p95"], choices=list(Measured.__dataclass_fields__))
    summing.set_defaults(do=summary)
    for command in (running, tabling, summing):
        command.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.do(options)


if __name__ == "__main__":
    main()
