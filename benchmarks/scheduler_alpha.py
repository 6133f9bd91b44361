"""Starvation threshold and promotion rule, judged by mean, P95 and P99 together: the numbers of docs/adr/0008.

OPT-13B on one A100 (DistServe's fitted times), 16 jobs a batch, ShareGPT-like lengths, Poisson arrivals. KV memory is
never short unless --blocks makes it so (16 tokens each). Every job counts. Runs one after the other in one process;
results depend on the seeds alone.

    python benchmarks/scheduler_alpha.py --jobs 1000 --load 0.92 --seeds 3
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fastserve_scheduler.core import CoreConfig, MlfqConfig, SchedulerCore
from fastserve_scheduler.sim import JobRecord, Simulator
from fastserve_scheduler.sim.cost import OPT_13B_A100
from fastserve_scheduler.sim.workload import poisson

BATCH = 16
MODEL_LEN = 2048
AMPLE_BLOCKS = 1 << 16


@dataclass(frozen=True)
class Variant:
    name: str
    policy: str = "skip-join-mlfq"
    alpha_s: float = 10.0
    promotion: Literal["reset", "return"] = "reset"


VARIANTS = [
    Variant("fcfs", policy="fcfs"),
    Variant("srpt", policy="srpt"),
    *(Variant(f"{alpha_s:g} s reset", alpha_s=alpha_s) for alpha_s in (0.3, 3, 10, 30)),
    *(Variant(f"{alpha_s:g} s return", alpha_s=alpha_s, promotion="return") for alpha_s in (0.3, 3, 10, 30)),
    Variant("never", alpha_s=1e9),
]


def run(
    variant: Variant, jobs_per_second: float, num_jobs: int, seed: int, num_blocks: int = AMPLE_BLOCKS
) -> list[JobRecord]:
    config = CoreConfig(
        num_stages=1,
        block_size=16,
        max_batch_size=BATCH,
        max_batch_tokens=4096,
        max_model_len=MODEL_LEN,
        max_waiting_jobs=num_jobs,
        max_waiting_tokens=num_jobs * MODEL_LEN,
        policy=variant.policy,
        mlfq=MlfqConfig(alpha_ns=round(variant.alpha_s * 1e9), promotion=variant.promotion),
    )
    core = SchedulerCore(config, OPT_13B_A100.profile(MODEL_LEN, BATCH))
    result = Simulator(core, OPT_13B_A100).run(poisson(num_jobs, jobs_per_second, seed), num_blocks)
    return list(result.jobs.values())


def capacity(seed: int = 100, num_jobs: int = 600) -> float:
    """Jobs per second completed between the first and the last fifth of a run in deep overload."""
    ends_ns = sorted(job.finished_ns for job in run(VARIANTS[0], 8.0, num_jobs, seed))
    first, last = num_jobs // 5, num_jobs * 4 // 5
    return (last - first) / ((ends_ns[last] - ends_ns[first]) / 1e9)


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def row(jobs: Sequence[JobRecord]) -> list[float]:
    """Normalised latency (mean, P95, P99), completion time (mean, P99), first token (mean), longest gap: seconds.

    Last: tokens computed again, per token of prompt and answer.
    """
    per_token = [job.latency_ns / job.output_tokens / 1e9 for job in jobs]
    whole = [job.latency_ns / 1e9 for job in jobs]
    first = [(job.first_token_ns - job.arrived_ns) / 1e9 for job in jobs]
    return [
        sum(per_token) / len(jobs),
        quantile(per_token, 0.95),
        quantile(per_token, 0.99),
        sum(whole) / len(jobs),
        quantile(whole, 0.99),
        sum(first) / len(jobs),
        max(job.max_gap_ns for job in jobs) / 1e9,
        sum(job.recomputed_tokens for job in jobs) / sum(job.prompt_tokens + job.output_tokens for job in jobs),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--load", type=float, default=0.92, help="arrival rate over measured capacity")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=AMPLE_BLOCKS)
    parser.add_argument("--variants", nargs="+", default=[variant.name for variant in VARIANTS])
    options = parser.parse_args()
    full = capacity()
    rate = full * options.load
    print(f"capacity {full:.3f} job/s; {options.jobs} jobs at {rate:.3f} job/s, {options.seeds} seeds, mean over seeds")
    print(f"{'':14}{'mean':>9}{'P95':>9}{'P99':>9}{'JCT':>9}{'JCT P99':>9}{'TTFT':>9}{'gap':>9}{'again':>9}")
    for variant in (variant for variant in VARIANTS if variant.name in options.variants):
        rows = [row(run(variant, rate, options.jobs, seed, options.blocks)) for seed in range(1, options.seeds + 1)]
        means = [sum(column) / len(column) for column in zip(*rows, strict=True)]
        print(f"{variant.name:14}" + "".join(f"{value:9.4f}" for value in means), flush=True)


if __name__ == "__main__":
    main()
