"""What an iteration of a full batch costs besides computing: plan, RPC, codec, sampling bookkeeping, result.

The whole system serves sixteen requests with one stage that answers known tokens. The control plane is the wall time of
an iteration less what the stage says it computed; the CPU that each service used is told too.

    python benchmarks/control_plane.py
    python benchmarks/control_plane.py --quick     # a smoke test: small numbers mean nothing
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from _cluster import Cluster, cluster
from _metrics import difference, free_ports, scrape

from fastserve import AsyncClient

CLIENTS = 16
#: All answers fit into the pool of a stage that computes nothing (4,096 tokens), so that nothing is preempted.
TOKENS = 240
TIMEOUT_S = 900
#: `--metrics-port` takes so many from its first one on, with one stage.
METRICS_PORTS = 3
SERVICES = ("gateway", "scheduler", "worker")


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """Per iteration. `control_s`: wall time less computing. `cpu_s`: of each service, computing included."""

    control_s: float
    compute_s: float
    iterations: int
    batch: float
    cpu_s: dict[str, float]


@contextmanager
def serving(model: str) -> Iterator[tuple[Cluster, int]]:
    """A cluster with one stage that computes next to nothing, and the port of the scheduler's metrics."""
    port = free_ports(METRICS_PORTS)
    flags = ("--fake", "--fake-iteration-ms", "0.001", "--fake-token-us", "0.001", "--stages", "1")
    with cluster(model, (*flags, "--metrics-port", str(port))) as where:
        yield where, port


def measure(where: Cluster, metrics_port: int, tokens: int, *, streamed: bool) -> ControlPlane:
    """`streamed`: the gateway also sends every token to its client as it comes, on the same cores."""
    asyncio.run(_ask(where, tokens, streamed))
    cpu, before, start_s = _cpu_s(), scrape(metrics_port), time.perf_counter()
    asyncio.run(_ask(where, tokens, streamed))
    wall_s, after, used = time.perf_counter() - start_s, scrape(metrics_port), _cpu_s()
    got = difference(after, before)
    count = int(got["fastserve:iteration_seconds_count"])
    compute_s = got["fastserve:iteration_seconds_sum"] / count
    return ControlPlane(
        control_s=wall_s / count - compute_s,
        compute_s=compute_s,
        iterations=count,
        batch=got["fastserve:iteration_batch_size_sum"] / count,
        cpu_s={name: (used[name] - cpu[name]) / count for name in SERVICES},
    )


async def _ask(where: Cluster, tokens: int, streamed: bool) -> None:
    async with AsyncClient(where.grpc, timeout_s=TIMEOUT_S) as client:

        async def one(index: int) -> None:
            prompt = [index + 1] * 8
            if streamed:
                async for _ in client.stream(prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True):
                    pass
            else:
                await client.generate(prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True)

        await asyncio.gather(*(one(index) for index in range(CLIENTS)))


def _cpu_s() -> dict[str, float]:
    """CPU that this machine's services have used so far, by name."""
    used = dict.fromkeys(SERVICES, 0.0)
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (folder / "cmdline").read_text().split("\0")
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        for name in SERVICES:
            if f"fastserve_{name}" in arguments:
                used[name] += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return used


def sentence(result: ControlPlane, *, streamed: bool) -> str:
    cpu = ", ".join(f"{name} {seconds * 1e3:.2f}" for name, seconds in result.cpu_s.items())
    how = "every token streamed to its client" if streamed else "answers sent whole"
    return (
        f"control plane, batch {CLIENTS}, {how}: {result.control_s * 1e3:.2f} ms per iteration beside "
        f"{result.compute_s * 1e3:.2f} of computing ({result.iterations} iterations of {result.batch:.1f} requests; "
        f"CPU in ms: {cpu})"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="whose tokenizer is served")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round of a few tokens")
    args = parser.parse_args()
    with serving(args.model) as (where, port):
        for _ in range(1 if args.quick else args.rounds):
            for streamed in (False, True):
                result = measure(where, port, 8 if args.quick else TOKENS, streamed=streamed)
                print(sentence(result, streamed=streamed), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
