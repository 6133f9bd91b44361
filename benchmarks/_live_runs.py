"""The live side of live_vs_simulated.py: one cluster with one stage, and three runs on it."""

import argparse
import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from _cluster import Cluster, cluster
from head_of_line import send

from fastserve.bench import arrivals, workload
from fastserve.bench.result import Setup, to_result
from fastserve.bench.workload import PromptMaker, Request, Shape
from fastserve_common.load.lengths import SHAREGPT

ALONE_REQUESTS, TOGETHER_TOKENS, WARM_UPS = 4, 48, 2


@dataclass(frozen=True, slots=True)
class LiveRuns:
    """Files: detailed results, and the profile that the scheduler used."""

    live: Path
    profile: Path
    alone: Path | None = None
    together: Path | None = None


def make_runs(args: argparse.Namespace) -> LiveRuns:
    """Raises ClusterError when it does not start."""
    out: Path = args.out
    profiles = out / "profiles"
    profiles.mkdir(parents=True, exist_ok=True)
    flags = ["--stages=1", f"--max-num-seqs={args.max_num_seqs}", f"--policy={args.policy}"]
    flags += [f"--profile-dir={profiles.absolute()}", "--host-kv-memory=0", *args.serve_flag]
    with cluster(args.model, flags) as where:
        prompts = PromptMaker(random.Random(args.seed))
        _run(where, _equal(prompts, WARM_UPS * args.max_num_seqs), None, None)
        _run(where, _equal(prompts, ALONE_REQUESTS), 1, out / "alone.json")
        _run(where, _equal(prompts, args.max_num_seqs), None, out / "together.json")
        shape = Shape(
            args.mean_input / SHAREGPT.mean_input, args.mean_output / SHAREGPT.mean_output, 256, args.max_output
        )
        requests = workload.like(SHAREGPT, args.num_prompts, shape, prompts)
        offsets_s = arrivals.constant_rate(len(requests), args.rate, 1.0, random.Random(args.seed))
        _run(where, requests, None, out / "live.json", offsets_s)
    (profile,) = profiles.glob("*.json")
    return LiveRuns(out / "live.json", profile, out / "alone.json", out / "together.json")


def _equal(prompts: PromptMaker, count: int) -> list[Request]:
    return [Request(prompts.ids(TOGETHER_TOKENS), TOGETHER_TOKENS, TOGETHER_TOKENS) for _ in range(count)]


def _run(
    where: Cluster,
    requests: Sequence[Request],
    max_concurrency: int | None,
    path: Path | None,
    offsets_s: Sequence[float] | None = None,
) -> None:
    measured = asyncio.run(send(where, requests, offsets_s or [0.0] * len(requests), max_concurrency))
    if path is not None:
        setup = Setup("openai", "completions", "", "", len(requests), "inf", "gamma", 1.0)
        path.write_text(json.dumps(to_result(setup, measured, datetime.now(UTC), detailed=True)) + "\n")
