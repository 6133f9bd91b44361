"""KV policies when memory is short, by latency, by time blocked on swapping and by what they move: ADR 0014's numbers.

OPT-13B on one A100 (DistServe's fitted times), 16 jobs a batch, ShareGPT-like lengths, Poisson arrivals, 931 blocks of
16 tokens on the device (14.9K tokens), 25 GB/s per direction. Every job counts. Runs one after the other in one
process; results depend on the seeds alone.

    python benchmarks/scheduler_swapping.py --jobs 400 --load 1.6 --seeds 2
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

from _timeline import Bar, busiest, hidden_share, save_plot

from fastserve_scheduler.core import CoreConfig, MlfqConfig, SchedulerCore, Snapshot
from fastserve_scheduler.core.commands import RunIteration
from fastserve_scheduler.core.config import KvRanking
from fastserve_scheduler.core.events import IterationDone, SwapDone
from fastserve_scheduler.sim import JobRecord, LinkCost, Result, Simulator
from fastserve_scheduler.sim.cost import OPT_13B_A100
from fastserve_scheduler.sim.workload import poisson

BATCH = 16
BLOCK_TOKENS = 16
MODEL_LEN = 2048
CAPACITY = 1.915
"""Jobs per second of this set-up with ample memory, as measured by scheduler_alpha.py."""

BLOCK_BYTES = BLOCK_TOKENS * 2 * 40 * 5120 * 2
"""K and V, 40 layers, hidden size 5120, two bytes each."""

COLUMNS = ("mean", "P95", "JCT", "JCT P99", "TTFT", "gap", "blocked", "stalled", "GB out", "GB in", "again", "ENST err")


@dataclass(frozen=True)
class Variant:
    name: str
    kv_policy: str
    kv_ranking: KvRanking = "order"


VARIANTS = [
    Variant("proactive enst", "proactive", "enst"),
    Variant("proactive order", "proactive"),
    Variant("reactive", "reactive"),
    Variant("blocking", "blocking"),
    Variant("recompute", "recompute"),
    Variant("defer", "defer"),
]


@dataclass(frozen=True)
class Setting:
    jobs: int
    rate: float
    blocks: int
    slots: int
    alpha_s: float
    gigabytes_per_second: float


def simulator(variant: Variant, setting: Setting) -> Simulator:
    config = CoreConfig(
        num_stages=1,
        block_size=BLOCK_TOKENS,
        max_batch_size=BATCH,
        max_batch_tokens=4096,
        max_model_len=MODEL_LEN,
        max_waiting_jobs=setting.jobs,
        max_waiting_tokens=setting.jobs * MODEL_LEN,
        mlfq=MlfqConfig(alpha_ns=round(setting.alpha_s * 1e9)),
        policy="skip-join-mlfq",
        kv_policy=variant.kv_policy,
        kv_ranking=variant.kv_ranking,
        kv_block_bytes=BLOCK_BYTES,
    )
    core = SchedulerCore(config, OPT_13B_A100.profile(MODEL_LEN, BATCH))
    link = LinkCost(BLOCK_BYTES, round(setting.gigabytes_per_second * 1e9), latency_ns=20_000)
    return Simulator(core, OPT_13B_A100, link=link)


def run(variant: Variant, setting: Setting, seed: int) -> tuple[list[JobRecord], Snapshot]:
    simulated = simulator(variant, setting)
    arrivals = poisson(setting.jobs, setting.rate, seed)
    result = simulated.run(arrivals, setting.blocks, host_slots=setting.slots)
    return list(result.jobs.values()), simulated.core.snapshot()


def bars_of(result: Result) -> list[Bar]:
    """What the one stage of a logged simulation computed and copied. Ends are when the core hears of them."""
    plans = [command for command in result.commands if isinstance(command, RunIteration)]
    direction = {op.swap_id: op.direction.value for plan in plans for op in plan.swaps}
    bars = []
    for at_ns, event in result.events:
        if isinstance(event, IterationDone) and event.compute_ns:
            bars.append(Bar(0, "compute", (at_ns - event.compute_ns) / 1e9, at_ns / 1e9))
        elif isinstance(event, SwapDone):
            bars.append(Bar(0, f"copy {direction[event.swap_id]}", (at_ns - event.copy_ns) / 1e9, at_ns / 1e9))
    return bars


def draw(variant: Variant, setting: Setting, folder: Path, width_s: float = 1.0) -> None:
    """A picture of the second with the most copying, and how much of all copying was hidden."""
    simulated = simulator(variant, setting)
    simulated.keep_log = True
    result = simulated.run(poisson(setting.jobs, setting.rate, 1), setting.blocks, host_slots=setting.slots)
    bars = bars_of(result)
    begin_s = max(0.0, busiest(bars, width_s) - width_s / 10)
    title = f"{variant.name}, OPT-13B on one A100, {setting.gigabytes_per_second:g} GB/s"
    path = folder / f"swap_timeline_{variant.kv_policy}.png"
    save_plot(bars, path, begin_s=begin_s, width_s=width_s, title=title)
    print(f"{variant.name:16}{hidden_share(bars):8.1%} of copying beside computing; {path.name}", flush=True)


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def row(jobs: list[JobRecord], snapshot: Snapshot) -> list[float]:
    """Seconds, except: `blocked` = share of all latency spent waiting for copies alone, GB, `again` = tokens computed
    again per token of prompt and answer. `ENST err`: mean of when a swapped job ran minus when ENST expected it."""
    per_token = [job.latency_ns / job.output_tokens / 1e9 for job in jobs]
    whole = [job.latency_ns / 1e9 for job in jobs]
    swap = snapshot.swap
    return [
        sum(per_token) / len(jobs),
        quantile(per_token, 0.95),
        sum(whole) / len(jobs),
        quantile(whole, 0.99),
        sum((job.first_token_ns - job.arrived_ns) / 1e9 for job in jobs) / len(jobs),
        max(job.max_gap_ns for job in jobs) / 1e9,
        swap.blocked_ns / 1e9 / sum(whole),
        swap.stalled_ns / 1e9,
        swap.bytes_out / 1e9,
        swap.bytes_in / 1e9,
        sum(job.recomputed_tokens for job in jobs) / sum(job.prompt_tokens + job.output_tokens for job in jobs),
        swap.enst_error_sum_ns / 1e9 / max(1, sum(swap.enst_error_counts)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=400)
    parser.add_argument("--load", type=float, default=1.6, help="arrival rate over capacity")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=931)
    parser.add_argument("--slots", type=int, default=8192)
    parser.add_argument("--alpha", type=float, default=10.0, help="seconds")
    parser.add_argument("--bandwidth", type=float, default=25.0, help="GB/s per direction")
    parser.add_argument("--timelines", type=Path, help="draw the first seed's into this folder, instead of the table")
    parser.add_argument("--variants", nargs="+", default=[variant.name for variant in VARIANTS])
    options = parser.parse_args()
    setting = Setting(
        options.jobs, CAPACITY * options.load, options.blocks, options.slots, options.alpha, options.bandwidth
    )
    print(
        f"{setting.jobs} jobs at {setting.rate:.3f} job/s (load {options.load}), {options.seeds} seeds, mean; {setting}"
    )
    chosen = [variant for variant in VARIANTS if variant.name in options.variants]
    if options.timelines:
        for variant in chosen:
            draw(variant, setting, options.timelines)
        return
    print(f"{'':16}" + "".join(f"{column:>10}" for column in COLUMNS))
    for variant in chosen:
        rows = [row(*run(variant, setting, seed)) for seed in range(1, options.seeds + 1)]
        means = [sum(column) / len(column) for column in zip(*rows, strict=True)]
        print(f"{variant.name:16}" + "".join(f"{value:10.4f}" for value in means), flush=True)


if __name__ == "__main__":
    main()
