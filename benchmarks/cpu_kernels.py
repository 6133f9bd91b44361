"""How far the CPU engine is from what the machine can do: its kernels, one decode iteration, an offline workload.

    python benchmarks/cpu_kernels.py linear attention            kernels alone, no model needed
    python benchmarks/cpu_kernels.py iteration --model DIR       one decode iteration, split by part
    python benchmarks/cpu_kernels.py workload --model DIR        mixed requests to their ends, tokens per second
    ... --threads 2 --json

Timings are the fastest of several rounds, variants taking turns, so that a busy machine disturbs all of them alike.
Reading plain memory takes turns too: floors are the bytes that must be read at that speed.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from fastserve_worker.engine.attention import native, reference
from fastserve_worker.engine.attention.params import AttentionParams
from fastserve_worker.engine.batch import BatchRow, PagedBatch
from fastserve_worker.engine.kv_pool import KvPool
from fastserve_worker.engine.linear import OneDnnLinear
from fastserve_worker.engine.native import NativeKernels, load_kernels
from fastserve_worker.engine.offline import OfflinePipeline

#: Weights of one size are cycled through this many copies, so that they come from memory as in a model.
WORKING_SET_BYTES = 96 << 20
LINEAR_SHAPES = ((1536, 576), (576, 1536), (49152, 576))
LINEAR_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ATTENTION_SHAPES = ((1, 1024), (8, 256), (16, 256), (32, 256), (8, 1024), (16, 1024))
ITERATION_SHAPES = ((1, 128), (4, 128), (8, 128), (16, 128), (16, 512))
#: Of the workload: 16 requests, prompts of 16-256 tokens, answers of 32-128.
WORKLOAD_REQUESTS, WORKLOAD_PROMPT, WORKLOAD_OUTPUT = 16, (16, 256), (32, 128)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table: what was measured and its numbers, in the units their names end with."""

    table: str
    case: str
    values: dict[str, float] = field(default_factory=dict)


def fastest_ms(variants: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Fastest wall time of each variant, taking turns, after one warm-up each."""
    best = dict.fromkeys(variants, float("inf"))
    for run in variants.values():
        run()
    for _ in range(rounds):
        for name, run in variants.items():
            begin = time.perf_counter()
            run()
            best[name] = min(best[name], (time.perf_counter() - begin) * 1e3)
    return best


class MemoryRead:
    """Reads 128 MiB, as one more variant that takes turns: what floors are computed from."""

    def __init__(self) -> None:
        self._memory = torch.ones(1 << 25)

    def __call__(self) -> None:
        self._memory.sum()

    def floor_ms(self, num_bytes: float, read_ms: float) -> float:
        """Least time to read `num_bytes`, at the speed of a run that took `read_ms`."""
        return num_bytes / self._memory.nbytes * read_ms


def each(run: Callable[..., object], inputs: torch.Tensor, weights: Sequence[object]) -> None:
    """`inputs` through every weight."""
    for weight in weights:
        run(inputs, weight)


def bench_linear(kernels: NativeKernels, rounds: int) -> list[Row]:
    """F.linear, oneDNN's and our own layouts; GFLOP/s of each, and the distance of ours to its memory floor."""
    read = MemoryRead()
    rows = []
    for num_outputs, num_inputs in LINEAR_SHAPES:
        copies = max(1, WORKING_SET_BYTES // (num_outputs * num_inputs * 4))
        weights = [torch.randn(num_outputs, num_inputs) for _ in range(copies)]
        packed = [kernels.pack(weight, None) for weight in weights]
        halves = [kernels.pack(weight.half(), None) for weight in weights]
        onednn = [OneDnnLinear(weight, None) for weight in weights]
        for num_rows in LINEAR_ROWS:
            x = torch.randn(num_rows, num_inputs)
            times = fastest_ms(
                {
                    "torch": partial(each, F.linear, x, weights),
                    "onednn": partial(each, lambda inputs, layer: layer(inputs), x, onednn),
                    "packed": partial(each, kernels.linear, x, packed),
                    "fp16": partial(each, kernels.linear, x, halves),
                    "read": read,
                },
                rounds,
            )
            flop = 2 * num_rows * num_outputs * num_inputs * copies
            floor_ms = read.floor_ms(num_outputs * num_inputs * 4 * copies, times.pop("read"))
            values = {f"{name}_gflops": flop / ms / 1e6 for name, ms in times.items()}
            values["packed_over_memory_floor"] = times["packed"] / floor_ms
            rows.append(Row("linear", f"{num_outputs}x{num_inputs} rows={num_rows}", values))
    return rows


class DecodeAttention:
    """The attention of one decode iteration: all layers, one new token per row."""

    def __init__(self, batch: PagedBatch, num_heads: int) -> None:
        pool = batch.pool
        self._batch = batch
        self._query = torch.randn(batch.num_rows, num_heads, pool.head_dim)
        self._key, self._value = torch.randn(2, batch.num_rows, pool.num_kv_heads, pool.head_dim)
        self._params = AttentionParams(scale=pool.head_dim**-0.5)

    def run(self, kernels: NativeKernels | None) -> None:
        """By kernel, or in plain torch."""
        for layer in range(self._batch.pool.num_layers):
            arguments = (self._query, self._key, self._value, layer, self._batch, self._params)
            if kernels is None:
                reference.attend(*arguments)
            else:
                native.attend(kernels, *arguments)


def bench_attention(kernels: NativeKernels, rounds: int) -> list[Row]:
    """One decode iteration's attention of 8 layers, 9 heads over 3 KV heads of 64."""
    layers, heads, kv_heads, head_dim = 8, 9, 3, 64
    read = MemoryRead()
    rows = []
    for num_rows, length in ATTENTION_SHAPES:
        per_row = -(-length // 16)
        pool = KvPool(num_blocks=num_rows * per_row, num_layers=layers, num_kv_heads=kv_heads, head_dim=head_dim)
        order = torch.randperm(num_rows * per_row, generator=torch.Generator().manual_seed(1)).tolist()
        lengths = [length - (row * length // (2 * num_rows)) for row in range(num_rows)]
        tables = [order[row * per_row : (row + 1) * per_row] for row in range(num_rows)]
        batch = PagedBatch([BatchRow(n - 1, 1, table, True) for n, table in zip(lengths, tables, strict=True)], pool)
        attention = DecodeAttention(batch, heads)
        variants: dict[str, Callable[[], object]] = {
            "native": partial(attention.run, kernels),
            "torch": partial(attention.run, None),
            "read": read,
        }
        times = fastest_ms(variants, rounds)
        floor_ms = read.floor_ms(sum(lengths) * layers * 2 * kv_heads * head_dim * 4, times.pop("read"))
        values = {f"{name}_ms": ms for name, ms in times.items()}
        values["native_over_memory_floor"] = times["native"] / floor_ms
        rows.append(Row("attention", f"{num_rows} x {length}", values))
    return rows


def bench_iteration(kernels: NativeKernels, model: Path, linear: str, rounds: int) -> list[Row]:
    """A whole decode iteration; its attention and its head measured alone on the same batch; the rest is the layers."""
    read = MemoryRead()
    pipeline = OfflinePipeline.load(model, num_blocks=16 * 40, linear=linear)
    shape = pipeline.stages[0].config
    weight_bytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    head = kernels.pack(torch.randn(shape.vocab_size, shape.hidden_size), None)
    rows = []
    for num_rows, length in ITERATION_SHAPES:
        sequences = [pipeline.add(random_ids(length, shape.vocab_size, seed=row), 10**6) for row in range(num_rows)]
        pipeline.step(sequences)
        batch = PagedBatch([BatchRow(length - 1, 1, s.blocks, True) for s in sequences], pipeline.pools[0])
        attention = DecodeAttention(batch, shape.num_heads)
        hidden = torch.randn(num_rows, shape.hidden_size)
        times = fastest_ms(
            {
                "iteration": partial(pipeline.step, sequences),
                "attention": partial(attention.run, kernels),
                "head": partial(kernels.linear, hidden, head),
                "read": read,
            },
            rounds,
        )
        floor_ms = read.floor_ms(weight_bytes + num_rows * length * shape.kv_block_bytes(1), times.pop("read"))
        values = {f"{name}_ms": ms for name, ms in times.items()}
        values["linear_and_rest_ms"] = times["iteration"] - times["attention"] - times["head"]
        values |= {"memory_floor_ms": floor_ms, "iteration_over_floor": times["iteration"] / floor_ms}
        rows.append(Row("iteration", f"{num_rows} x {length}", values))
        for sequence in sequences:
            pipeline.preempt_by_recompute(sequence)
    return rows


def bench_workload(model: Path, linear: str, rounds: int) -> list[Row]:
    """Requests of mixed lengths that arrive together, in one process, greedy, to their ends."""
    pipeline = OfflinePipeline.load(model, num_blocks=512, linear=linear)
    rng = random.Random(7)
    lengths = [(rng.randint(*WORKLOAD_PROMPT), rng.randint(*WORKLOAD_OUTPUT)) for _ in range(WORKLOAD_REQUESTS)]
    vocab_size = pipeline.stages[0].config.vocab_size
    prompts = [random_ids(prompt, vocab_size, seed=index) for index, (prompt, _) in enumerate(lengths)]
    outputs = [output for _, output in lengths]
    pipeline.generate([prompts[0][:16]], [2])
    walls, cpus = [], []
    for _ in range(rounds):
        wall, cpu = time.perf_counter(), time.process_time()
        pipeline.generate(prompts, outputs)
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    values = {
        "prompt_tokens": float(sum(map(len, prompts))),
        "output_tokens": float(sum(outputs)),
        "best_output_tokens_per_s": sum(outputs) / min(walls),
        "median_output_tokens_per_s": sum(outputs) / statistics.median(walls),
        "best_output_tokens_per_cpu_s": sum(outputs) / min(cpus),
    }
    return [Row("workload", f"{WORKLOAD_REQUESTS} requests", values)]


def random_ids(count: int, vocab_size: int, seed: int) -> list[int]:
    """Token ids of a prompt without meaning."""
    return torch.randint(3, vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def print_tables(rows: Sequence[Row]) -> None:
    """Rows of one table share their columns."""
    for table in dict.fromkeys(row.table for row in rows):
        chosen = [row for row in rows if row.table == table]
        print(f"\n{table:24s}" + "".join(f"{name:>{len(name) + 2}s}" for name in chosen[0].values))
        for row in chosen:
            print(f"{row.case:24s}" + "".join(f"{v:{len(name) + 2}.2f}" for name, v in row.values.items()))


def main(arguments: Sequence[str]) -> None:
    """Run the chosen benchmarks and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmarks", nargs="+", choices=("linear", "attention", "iteration", "workload"))
    parser.add_argument("--model", type=Path, help="folder of config.json and safetensors weights")
    parser.add_argument("--linear", default="auto", help="kind of linear layers of iteration and workload")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    kernels = load_kernels()
    if kernels is None:
        parser.error("this machine cannot build the native kernels")
    if options.model is None and {"iteration", "workload"} & set(options.benchmarks):
        parser.error("iteration and workload need --model")

    rows: list[Row] = []
    for name in options.benchmarks:
        if name == "linear":
            rows += bench_linear(kernels, options.rounds)
        elif name == "attention":
            rows += bench_attention(kernels, options.rounds)
        elif name == "iteration":
            rows += bench_iteration(kernels, options.model, options.linear, options.rounds)
        else:
            rows += bench_workload(options.model, options.linear, options.rounds)
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        print_tables(rows)


if __name__ == "__main__":
    main(sys.argv[1:])
