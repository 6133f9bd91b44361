"""`fastserve bench`: from flags to a measured run, its report and its files."""

import asyncio
import json
import math
import random
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fastserve._http import HttpClient
from fastserve.bench import arrivals, traces, workload
from fastserve.bench.backends import Backend, BackendError, Target
from fastserve.bench.grpc_backend import GrpcBackend
from fastserve.bench.metrics import Outcome
from fastserve.bench.openai_backend import OpenAiBackend
from fastserve.bench.options import Options
from fastserve.bench.plot import PlotError, save_plot
from fastserve.bench.report import print_report
from fastserve.bench.result import Result, Setup, to_result
from fastserve.bench.runner import Measured, Runner
from fastserve.bench.workload import CountTokens, PromptMaker, Request, WorkloadError
from fastserve_common.load.lengths import MODELS

READY_POLL_S = 0.25


class BenchError(Exception):
    """The benchmark cannot run; a sentence for whoever started it."""


def run(options: Options, console: Console) -> int:
    """Measure, report, save. Returns the exit status: 1 when nothing completed or nothing could be measured."""
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
            measured, result = loop.run(measure(options, console))
        _save(options, measured, result, console)
    except (BenchError, BackendError, WorkloadError, PlotError) as error:
        Console(stderr=True).print(f"fastserve bench: {error}", markup=False, highlight=False, soft_wrap=True)
        return 1
    return 0 if result["completed"] else 1


async def measure(options: Options, console: Console) -> tuple[Measured, Result]:
    """One run. Raises BackendError when the server does not answer, WorkloadError when there is nothing to send."""
    backend = make_backend(options)
    try:
        target = await _ready(backend, options.ready_timeout_s)
        rng = random.Random(options.seed)
        requests = await make_requests(options, backend, target, rng)
        offsets_s, shape = plan(options, requests, rng)
        await _warm_up(backend, requests[: options.warmups], options)
        measured = await _run(options, backend, requests, offsets_s, console)
    finally:
        await backend.close()
    setup = _setup(options, backend, target, shape, len(requests), offsets_s)
    result = to_result(setup, measured, datetime.now().astimezone(), detailed=options.output.detailed)
    print_report(console, setup, result)
    _print_errors(console, measured.run.outcomes)
    return measured, result


def make_backend(options: Options) -> Backend:
    """Raises BenchError for a URL or header that makes no sense."""
    if options.backend == "fastserve-grpc":
        return GrpcBackend(options.address, options.decoding, options.api_key)
    headers = dict(options.headers)
    if options.api_key:
        headers["Authorization"] = f"Bearer {options.api_key}"
    try:
        http = HttpClient(options.base_url, headers, verify=options.verify_tls)
    except ValueError as error:
        raise BenchError(str(error)) from error
    return OpenAiBackend(http, options.decoding, model=options.model, endpoint=options.endpoint)


async def _ready(backend: Backend, timeout_s: float) -> Target:
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            return await backend.describe()
        except BackendError:
            if time.monotonic() >= deadline_s:
                raise
        await asyncio.sleep(READY_POLL_S)


async def make_requests(options: Options, backend: Backend, target: Target, rng: random.Random) -> list[Request]:
    """The workload. Raises WorkloadError, or BackendError when the server counts tokens and fails."""
    prompts = PromptMaker(rng, options.vocab_size or target.vocab_size)
    shape, count, path = options.shape, options.num_prompts, options.dataset_path
    if options.dataset in MODELS:
        return workload.like(MODELS[options.dataset], count, shape, prompts)
    if options.dataset == "random":
        return workload.uniform(count, options.input_len, options.output_len, options.range_ratio, prompts)
    assert path is not None  # checked with the flags
    if options.dataset == "sharegpt":
        return await workload.sharegpt(path, count, shape, rng, token_counter(options.tokenizer, backend))
    return traces.replay(options.dataset, path, count, shape, prompts, options.time_scale)


def token_counter(tokenizer: str | None, backend: Backend) -> CountTokens:
    """By a local tokenizer.json, or by the server. Raises WorkloadError when the file or its library is missing."""
    if tokenizer is None:
        return backend.count_tokens
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise WorkloadError("--tokenizer needs the tokenizers package: pip install tokenizers") from error
    path = Path(tokenizer)
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        local = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise WorkloadError(f"--tokenizer: cannot read {file}: {error}") from error

    async def count(text: str) -> int:
        return len(local.encode(text, add_special_tokens=False).ids)

    return count


def plan(options: Options, requests: Sequence[Request], rng: random.Random) -> tuple[list[float], str]:
    """When each request is sent, and the name of that arrival process."""
    if requests[0].arrival_s is not None:
        return [request.arrival_s or 0.0 for request in requests], "trace"
    if options.ramp is not None:
        return arrivals.ramped(len(requests), options.ramp, options.burstiness, rng), f"ramp-{options.ramp.shape}"
    offsets_s = arrivals.constant_rate(len(requests), options.rate_rps, options.burstiness, rng)
    if math.isinf(options.rate_rps):
        return offsets_s, "at-once"
    return offsets_s, "fixed" if math.isinf(options.burstiness) else "gamma"


async def _warm_up(backend: Backend, requests: Sequence[Request], options: Options) -> None:
    if not requests:
        return
    warm = await Runner(backend, options.timeout_s, max_concurrency=1).run(requests, [0.0] * len(requests))
    if warm.run.failed:
        raise BenchError(f"a warm-up request failed: {next(o.error for o in warm.run.outcomes if o.error)}")


async def _run(
    options: Options, backend: Backend, requests: Sequence[Request], offsets_s: Sequence[float], console: Console
) -> Measured:
    runner = Runner(backend, options.timeout_s, options.max_concurrency)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Twice a second: drawing costs processor time that the measured server may need.
    with Progress(*columns, console=console, refresh_per_second=2, disable=not options.output.progress) as progress:
        task = progress.add_task("requests", total=len(requests))
        return await runner.run(requests, offsets_s, lambda _: progress.advance(task))


def _setup(
    options: Options, backend: Backend, target: Target, arrival: str, num_prompts: int, offsets_s: Sequence[float]
) -> Setup:
    rate: float | str = "inf" if math.isinf(options.rate_rps) else options.rate_rps
    if arrival == "trace" and offsets_s[-1] > 0:
        rate = (num_prompts - 1) / offsets_s[-1]
    ramp = options.ramp
    return Setup(
        backend=options.backend,
        endpoint_type=backend.name,
        model_id=target.model,
        tokenizer_id=options.tokenizer or target.root,
        num_prompts=num_prompts,
        request_rate=rate,
        arrivals=arrival,
        burstiness="inf" if math.isinf(options.burstiness) else options.burstiness,
        max_concurrency=options.max_concurrency,
        label=options.output.label,
        metadata=options.output.metadata,
        ramp_up={}
        if ramp is None
        else {
            "ramp_up_strategy": ramp.shape,
            "ramp_up_start_rps": ramp.start_rps,
            "ramp_up_end_rps": ramp.end_rps,
        },
        slo_ms=options.output.slo_ms,
        metrics=options.output.metrics,
        percentiles=options.output.percentiles,
    )


def _print_errors(console: Console, outcomes: Sequence[Outcome]) -> None:
    """Each distinct failure once, with how often it came."""
    counts: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.error:
            counts[outcome.error] = counts.get(outcome.error, 0) + 1
    for error, count in sorted(counts.items(), key=lambda item: -item[1])[:10]:
        console.print(f"{count} x {error}", markup=False, highlight=False)


def _save(options: Options, measured: Measured, result: Result, console: Console) -> None:
    output = options.output
    if output.plot is not None:
        save_plot(measured.run, output.plot, f"{result['model_id']}, {result['request_rate']} req/s")
        console.print(f"Saved {output.plot}", highlight=False, soft_wrap=True)
    if output.save:
        path = output.directory / (output.filename or _filename(result))
        try:
            output.directory.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(result) + "\n", encoding="utf-8")
        except OSError as error:
            raise BenchError(f"cannot write {path}: {error.strerror}") from error
        console.print(f"Saved {path}", highlight=False, soft_wrap=True)


def _filename(result: Result) -> str:
    label = result["label"] or result["endpoint_type"]
    concurrency = "" if result["max_concurrency"] is None else f"-concurrency{result['max_concurrency']}"
    model = str(result["model_id"]).split("/")[-1]
    return f"{label}-{result['request_rate']}qps{concurrency}-{model}-{result['date']}.json"
