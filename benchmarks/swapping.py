"""KV policies on a live cluster whose device pool is several times too small: the same trace under every policy.

For each policy a cluster of its own is started with the same engine. Capacity is measured first, closed loop, with
ample memory under fcfs; the loads are multiples of it. Results go to a file after every point, and a point that is in
the file is not measured again: with --pieces 1 a run can be cut into pieces of one cluster each.

    python benchmarks/swapping.py                  # all policies, 80, 110 and 150 % of capacity
    python benchmarks/swapping.py --pieces 1       # capacity, or what is missing of the next policy
    python benchmarks/swapping.py --quick          # a smoke test: small numbers mean nothing
"""

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import _timeline
import head_of_line
from _cluster import Cluster, ClusterError, cluster
from _metrics import difference, free_ports, scrape
from _swapping_report import Row, save_plot, table
from head_of_line import measure_capacity, send, warm_up

from fastserve_common.units import format_bytes

KV_POLICIES = ("proactive", "reactive", "blocking", "recompute", "defer")
BLOCK_TOKENS = 16
TIMELINE_OF = "proactive"
#: `--metrics-port` takes so many from its first one on, with two stages.
METRICS_PORTS = 4
#: Width of the timeline's picture.
WINDOW_S = 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run. `pool_blocks` is what a policy has to do with; capacity is measured without want."""

    trace: head_of_line.Plan
    kv_policies: tuple[str, ...]
    pool_blocks: int
    block_bytes: int

    def flags(self, kv_policy: str, metrics_port: int, timeline: Path | None) -> tuple[str, ...]:
        return (
            *self.trace.flags("default"),
            *("--kv-policy", kv_policy, "--kv-memory", str(self.pool_blocks * self.block_bytes)),
            *("--max-model-len", str(self.trace.max_input + self.trace.max_output)),
            *("--metrics-port", str(metrics_port)),
            *(("--timeline", str(timeline)) if timeline else ()),
        )


def measure_policy(
    plan: Plan, kv_policy: str, loads: Sequence[float], capacity_rps: float, timeline: Path | None
) -> Iterator[Row]:
    """These loads on one cluster; it is idle between them."""
    port, trace = free_ports(METRICS_PORTS), plan.trace
    with cluster(trace.model, plan.flags(kv_policy, port, timeline)) as where:
        warm_up(where, trace)
        for load in loads:
            row = _measure(plan, where, kv_policy, load, load * capacity_rps, port)
            print(row.sentence(), flush=True)
            yield row


def _measure(plan: Plan, where: Cluster, kv_policy: str, load: float, rate_rps: float, port: int) -> Row:
    trace, before = plan.trace, scrape(port)
    measured = asyncio.run(send(where, trace.requests(trace.seed), trace.offsets_s(trace.seed, rate_rps)))
    got = difference(scrape(port), before)
    return Row.of(kv_policy, load, rate_rps, measured, got, plan.pool_blocks * BLOCK_TOKENS)


def run(plan: Plan, out: Path, pieces: int, capacity_rps: float | None) -> bool:
    """Do what is missing, `pieces` of it at most. True when everything is there. Raises ClusterError.

    `capacity_rps` None: it is measured.
    """
    done = _load(out, plan)
    if "capacity_rps" not in done:
        done["capacity_rps"] = capacity_rps or measure_capacity(plan.trace)
        pieces -= capacity_rps is None
        _save(out, done)
    for kv_policy in plan.kv_policies:
        known = {row["load"] for row in done["rows"] if row["kv_policy"] == kv_policy}
        loads = [load for load in plan.trace.loads if load not in known]
        if not loads:
            continue
        if pieces == 0:
            return False
        pieces -= 1
        timeline = (out / "swapping_trace.json").resolve() if kv_policy == TIMELINE_OF else None
        for row in measure_policy(plan, kv_policy, loads, done["capacity_rps"], timeline):
            done["rows"].append(asdict(row))
            _save(out, done)
    return True


def _save(out: Path, done: dict[str, Any]) -> None:
    (out / "swapping.json").write_text(json.dumps(done, indent=1) + "\n")


def _load(out: Path, plan: Plan) -> dict[str, Any]:
    path, fresh = out / "swapping.json", json.loads(json.dumps(asdict(plan)))
    if path.exists():
        done: dict[str, Any] = json.loads(path.read_text())
        if done["plan"] == fresh:
            return done
        raise ClusterError(f"{path} is of another plan; move it away, or ask for the same")
    machine = {"cpus": os.cpu_count(), "system": platform.system(), "processor": platform.machine()}
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"date": date, "machine": machine, "plan": fresh, "rows": []}


def report(out: Path) -> str:
    """Table, picture and timeline of what is in `out`."""
    rows = [Row(**row) for row in json.loads((out / "swapping.json").read_text())["rows"]]
    text = table(rows)
    trace_path = out / "swapping_trace.json"
    if trace_path.exists():
        trace = json.loads(trace_path.read_text())
        if found := _timeline.problems(trace):
            raise ClusterError(f"the trace is broken: {found[0]}")
        bars = _timeline.bars(trace)
        text += f"\nOf the time in copies, {_timeline.hidden_share(bars):.1%} passed while the same stage computed.\n"
        begin_s = max(0.0, _timeline.busiest(bars, WINDOW_S) - WINDOW_S / 10)
        title = f"{TIMELINE_OF}: the second with the most copying"
        _timeline.save_plot(bars, out / "swapping_timeline.png", begin_s=begin_s, width_s=WINDOW_S, title=title)
    (out / "swapping.md").write_text(text)
    save_plot(rows, out / "swapping.png")
    return text


def main() -> int:
    args = _parse()
    plan = _plan(args)
    out = args.out or Path(tempfile.mkdtemp(prefix="swapping-") if args.quick else "docs/img")
    out.mkdir(parents=True, exist_ok=True)
    try:
        pool = format_bytes(plan.pool_blocks * plan.block_bytes)
        print(f"pool: {plan.pool_blocks} blocks of {BLOCK_TOKENS} tokens, {pool}", flush=True)
        if not run(plan, out, args.pieces, args.capacity):
            print("there is more to do: the same command goes on")
            return 0
        print(f"\n{report(out)}\nwritten to {out}")
    except ClusterError as error:
        print(f"swapping: {error}", file=sys.stderr)
        return 1
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="smollm2-135m-instruct", help="as for `fastserve serve`")
    add("--kv-policies", nargs="+", choices=KV_POLICIES, default=list(KV_POLICIES))
    add("--loads", nargs="+", type=float, default=[0.8, 1.1, 1.5], help="shares of capacity")
    add("--num-prompts", type=int, default=80, help="requests in a run")
    add("--seed", type=int, default=0)
    add("--max-num-seqs", type=int, default=2, help="batch size: small, so that the pool can be several batches")
    add("--mean-input", type=float, default=40, help="tokens, before cutting")
    add("--mean-output", type=float, default=40, help="tokens, before cutting")
    add("--max-length", type=int, default=224, help="longest prompt, and longest answer, in tokens")
    add("--pool-blocks", type=int, default=32, help="blocks of 16 tokens on the device")
    add("--block-bytes", type=int, default=737_280, help="one block of all layers: the demo model in float32")
    add("--capacity", type=float, help="requests per second, instead of measuring it")
    add("--pieces", type=int, default=1000, help="stop after so many clusters")
    add("--serve-flag", action="append", default=[], help="more for `fastserve serve`, such as --serve-flag=--stages=1")
    add(
        "--out",
        type=Path,
        help="folder for swapping.{json,md,png} and the trace (default: docs/img; --quick: a new one)",
    )
    add("--quick", action="store_true", help="two policies, one load, 16 short requests")
    return parser.parse_args()


def _plan(args: argparse.Namespace) -> Plan:
    quick = args.quick
    trace = head_of_line.Plan(
        model=args.model,
        serve_flags=tuple(args.serve_flag),
        policies=(),
        loads=(1.1,) if quick else tuple(args.loads),
        num_prompts=16 if quick else args.num_prompts,
        repeats=1,
        seed=args.seed,
        max_num_seqs=args.max_num_seqs,
        mean_input=10 if quick else args.mean_input,
        mean_output=10 if quick else args.mean_output,
        max_input=args.max_length,
        max_output=args.max_length,
    )
    kv_policies = ("proactive", "recompute") if quick else tuple(args.kv_policies)
    return Plan(trace, kv_policies, args.pool_blocks, args.block_bytes)


if __name__ == "__main__":
    sys.exit(main())
