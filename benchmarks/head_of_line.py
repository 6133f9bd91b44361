"""Head-of-line blocking on a live cluster: the same trace under every policy, through the public API.

For each policy a cluster of its own is started with the same engine. Lengths are ShareGPT's, scaled down so that a run
takes minutes on two cores, and skewed as the original: a few long answers among many short ones. Capacity is measured
first, closed loop under fcfs; the loads are multiples of it. Every policy gets the same requests at the same times.

    python benchmarks/head_of_line.py                    # all policies, 70, 92 and 130 % of capacity
    python benchmarks/head_of_line.py --quick            # a smoke test: small numbers mean nothing
"""

import argparse
import asyncio
import json
import os
import platform
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from _cluster import Cluster, ClusterError, cluster, num_preemptions
from _head_of_line_report import Row, save_plot, table

from fastserve._http import HttpClient
from fastserve.bench import arrivals, workload
from fastserve.bench.backends import Decoding
from fastserve.bench.metrics import Run
from fastserve.bench.openai_backend import OpenAiBackend
from fastserve.bench.runner import Measured, Runner
from fastserve.bench.workload import PromptMaker, Request, Shape
from fastserve_common.load import stats
from fastserve_common.load.lengths import SHAREGPT

#: Flags of `fastserve serve` for each policy. `mlfq` and `paper` know no lengths. A request's limit here is the length
#: of its answer, as in other serving benchmarks: `default` finds out after some dozens of answers and orders by it.
POLICIES: dict[str, tuple[str, ...]] = {
    "fcfs": ("--policy", "fcfs"),
    "round-robin": ("--policy", "round-robin"),
    "paper": ("--policy", "skip-join-mlfq", "--preset", "paper"),
    "mlfq": ("--policy", "skip-join-mlfq"),
    "default": (),
}
BASELINE = "fcfs"

#: Closed-loop clients per sequence of the batch while capacity is measured: the batch is always full.
CLIENTS_PER_SEQ = 4
#: Shares of a saturated run that are left out at its ends: filling up and running empty.
RAMP_SHARE = 0.15


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run. Lengths in tokens; loads as shares of the measured capacity."""

    model: str
    serve_flags: tuple[str, ...]
    policies: tuple[str, ...]
    loads: tuple[float, ...]
    num_prompts: int
    repeats: int
    seed: int
    max_num_seqs: int
    mean_input: float
    mean_output: float
    max_input: int
    max_output: int

    def requests(self, seed: int) -> list[Request]:
        """Drawn anew from the seed at each call, so equal for every policy."""
        shape = Shape(
            input_scale=self.mean_input / SHAREGPT.mean_input,
            output_scale=self.mean_output / SHAREGPT.mean_output,
            max_input_tokens=self.max_input,
            max_output_tokens=self.max_output,
        )
        return workload.like(SHAREGPT, self.num_prompts, shape, PromptMaker(random.Random(seed)))

    def offsets_s(self, seed: int, rate_rps: float) -> list[float]:
        """Poisson arrivals; the same draw at every load, only faster or slower."""
        return arrivals.constant_rate(self.num_prompts, rate_rps, 1.0, random.Random(seed + 1_000_000))

    def flags(self, policy: str) -> tuple[str, ...]:
        return (*POLICIES[policy], "--max-num-seqs", str(self.max_num_seqs), *self.serve_flags)


def saturated_tokens_per_s(run: Run) -> float:
    """Output tokens per second while the batch was full: after filling up, until the last request was sent."""
    begin_s = run.duration_s * RAMP_SHARE
    end_s = max(o.sent_s for o in run.outcomes)
    if end_s <= begin_s:
        return run.per_second(run.output_tokens)
    arrived = sum(tokens for o in run.completed for time_s, tokens in o.token_arrivals() if begin_s <= time_s < end_s)
    return arrived / (end_s - begin_s)


async def send(
    where: Cluster, requests: Sequence[Request], offsets_s: Sequence[float], max_concurrency: int | None = None
) -> Measured:
    # HTTP, not gRPC: a streamed token costs this client a quarter of the processor time, which the servers need.
    backend = OpenAiBackend(HttpClient(f"http://{where.http}"), Decoding(ignore_eos=True))
    try:
        await backend.describe()
        return await Runner(backend, max_concurrency=max_concurrency).run(requests, offsets_s)
    finally:
        await backend.close()


def warm_up(where: Cluster, plan: Plan) -> None:
    """Two full batches, so that nothing is done for the first time while it is measured."""
    requests = plan.requests(plan.seed + 2_000_000)[: 2 * plan.max_num_seqs]
    measured = asyncio.run(send(where, requests, [0.0] * len(requests)))
    if measured.run.failed:
        raise ClusterError(f"a warm-up request failed: {next(o.error for o in measured.run.outcomes if o.error)}")


def measure_capacity(plan: Plan) -> float:
    """Requests of this trace per second that fcfs serves at most."""
    with cluster(plan.model, plan.flags(BASELINE)) as where:
        warm_up(where, plan)
        requests = plan.requests(plan.seed)
        clients = CLIENTS_PER_SEQ * plan.max_num_seqs
        run = asyncio.run(send(where, requests, [0.0] * len(requests), clients)).run
    if not run.completed:
        raise ClusterError(f"no request completed: {run.outcomes[0].error}")
    tokens_per_s = saturated_tokens_per_s(run)
    mean_output = stats.mean([r.output_tokens for r in requests])
    print(
        f"capacity: {tokens_per_s:.1f} output tokens/s, {tokens_per_s / mean_output:.3f} requests/s "
        f"({len(requests)} requests in {run.duration_s:.0f} s, {clients} clients)",
        flush=True,
    )
    return tokens_per_s / mean_output


def measure_policy(plan: Plan, policy: str, repeat: int, capacity_rps: float) -> list[Row]:
    """All loads on one cluster; it is idle between them."""
    rows = []
    seed = plan.seed + repeat
    with cluster(plan.model, plan.flags(policy)) as where:
        warm_up(where, plan)
        for load in plan.loads:
            rate_rps, before = load * capacity_rps, num_preemptions(where)
            measured = asyncio.run(send(where, plan.requests(seed), plan.offsets_s(seed, rate_rps)))
            row = Row.of(policy, load, repeat, rate_rps, measured, num_preemptions(where) - before)
            print(row.sentence(), flush=True)
            rows.append(row)
    return rows


def main() -> int:
    args = _parse()
    plan = _plan(args)
    out = args.out or (Path(tempfile.mkdtemp(prefix="head-of-line-")) if args.quick else Path("docs/img"))
    try:
        capacity_rps = args.capacity or measure_capacity(plan)
        # Policies inside, repeats outside: drift of the machine meets all policies alike.
        rows = [
            row
            for repeat in range(plan.repeats)
            for policy in plan.policies
            for row in measure_policy(plan, policy, repeat, capacity_rps)
        ]
    except ClusterError as error:
        print(f"head_of_line: {error}", file=sys.stderr)
        return 1
    out.mkdir(parents=True, exist_ok=True)
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cpus": os.cpu_count(), "system": platform.system(), "processor": platform.machine()},
        "plan": asdict(plan),
        "capacity_rps": capacity_rps,
        "rows": [asdict(row) for row in rows],
    }
    (out / "head_of_line.json").write_text(json.dumps(result, indent=1) + "\n")
    text = table(rows, BASELINE)
    (out / "head_of_line.md").write_text(text)
    save_plot(rows, out / "head_of_line.png")
    print(f"\n{text}\nwritten to {out}")
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="smollm2-135m-instruct", help="as for `fastserve serve`")
    add("--policies", nargs="+", choices=sorted(POLICIES), default=list(POLICIES))
    add("--loads", nargs="+", type=float, default=[0.7, 0.92, 1.3], help="shares of capacity")
    add("--num-prompts", type=int, default=300, help="requests in a run")
    add("--repeats", type=int, default=1, help="runs with another seed each, policies interleaved")
    add("--seed", type=int, default=0)
    add("--max-num-seqs", type=int, default=8, help="batch size: small enough that queueing matters")
    add("--mean-input", type=float, default=30, help="tokens, before cutting")
    add("--mean-output", type=float, default=30, help="tokens, before cutting")
    add("--max-input", type=int, default=256)
    add("--max-output", type=int, default=256)
    add("--capacity", type=float, help="requests per second, instead of measuring it")
    add("--serve-flag", action="append", default=[], help="more for `fastserve serve`, such as --serve-flag=--stages=1")
    add("--out", type=Path, help="folder for head_of_line.{json,md,png} (default: docs/img; with --quick a new one)")
    add("--quick", action="store_true", help="two policies, one load, 24 short requests")
    return parser.parse_args()


def _plan(args: argparse.Namespace) -> Plan:
    quick = args.quick
    return Plan(
        model=args.model,
        serve_flags=tuple(args.serve_flag),
        policies=(BASELINE, "default") if quick else tuple(args.policies),
        loads=(0.92,) if quick else tuple(args.loads),
        num_prompts=24 if quick else args.num_prompts,
        repeats=1 if quick else args.repeats,
        seed=args.seed,
        max_num_seqs=args.max_num_seqs,
        mean_input=10 if quick else args.mean_input,
        mean_output=10 if quick else args.mean_output,
        max_input=args.max_input,
        max_output=args.max_output,
    )


if __name__ == "__main__":
    sys.exit(main())
