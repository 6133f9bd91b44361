"""The flags of `fastserve bench`, named as other serving benchmarks name them, and their one validated form."""

import argparse
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from fastserve.bench.arrivals import Ramp, RampShape
from fastserve.bench.backends import Decoding
from fastserve.bench.metrics import METRICS, Metric
from fastserve.bench.workload import Shape
from fastserve_common.load.lengths import MODELS
from fastserve_common.load.traces import READERS

BACKENDS = ("openai", "openai-chat", "fastserve-grpc")
DATASETS = ("random", *MODELS, "sharegpt", *READERS)
#: Data sets that are files of the user's.
FILE_DATASETS = ("sharegpt", *READERS)
SLO_NAMES = ("ttft", "tpot", "e2el")


class OptionError(ValueError):
    """A sentence for the person who typed the flags."""


@dataclass(frozen=True, slots=True)
class Output:
    """Where results go. `percentiles` in percent."""

    metrics: tuple[Metric, ...]
    percentiles: tuple[float, ...]
    slo_ms: dict[str, float]
    save: bool
    detailed: bool
    directory: Path
    filename: str | None
    metadata: dict[str, str]
    label: str | None
    plot: Path | None
    progress: bool


@dataclass(frozen=True, slots=True)
class Options:
    """Everything that was asked for, checked."""

    backend: str
    base_url: str
    address: str
    endpoint: str
    model: str | None
    api_key: str | None
    headers: dict[str, str]
    verify_tls: bool
    tokenizer: str | None
    vocab_size: int | None
    dataset: str
    dataset_path: Path | None
    num_prompts: int
    seed: int
    input_len: int
    output_len: int
    range_ratio: float
    shape: Shape
    time_scale: float
    rate_rps: float
    burstiness: float
    ramp: Ramp | None
    max_concurrency: int | None
    warmups: int
    timeout_s: float | None
    ready_timeout_s: float
    decoding: Decoding
    output: Output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All flags of the benchmark."""
    _add_server(parser.add_argument_group("server"))
    _add_workload(parser.add_argument_group("workload"))
    _add_arrivals(parser.add_argument_group("arrivals"))
    _add_decoding(parser.add_argument_group("decoding"))
    _add_output(parser.add_argument_group("output"))


def _add_server(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--backend", choices=BACKENDS, default="openai", help="which API to measure (default: openai)")
    add("--base-url", help="of an HTTP server (default: http://HOST:PORT)")
    add("--host", default="127.0.0.1", help="(default: 127.0.0.1)")
    add("--port", type=int, help="(default: 8000, gRPC 8001)")
    add("--endpoint", help="path of the HTTP API (default: /v1/completions, of openai-chat /v1/chat/completions)")
    add("--model", help="model to ask for (default: the first that the server lists)")
    add("--api-key", help="sent as a bearer token (default: $FASTSERVE_API_KEY or $OPENAI_API_KEY)")
    add("--header", action="append", default=[], metavar="KEY=VALUE", help="added to HTTP requests; may be repeated")
    add("--insecure", action="store_true", help="do not verify the server's TLS certificate")
    add("--timeout", type=float, default=0.0, metavar="S", help="of one request; 0: none (default: 0)")
    add(
        "--ready-check-timeout-sec",
        type=float,
        default=0.0,
        metavar="S",
        help="wait this long for the server to answer",
    )


def _add_workload(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--dataset-name", choices=DATASETS, default="sharegpt-like", help="(default: sharegpt-like)")
    add("--dataset-path", type=Path, metavar="FILE", help=f"for {', '.join(FILE_DATASETS)}")
    add("--num-prompts", type=int, default=1000, metavar="N", help="(default: 1000)")
    add("--seed", type=int, default=0, help="of lengths, prompts and arrivals (default: 0)")
    add("--input-len", "--random-input-len", type=int, default=1024, metavar="N", help="of `random` (default: 1024)")
    add("--output-len", "--random-output-len", type=int, default=128, metavar="N", help="of `random` (default: 128)")
    add("--random-range-ratio", type=float, default=0.0, metavar="R", help="`random` draws from len * [1 - R, 1 + R]")
    add("--input-scale", type=float, default=1.0, metavar="X", help="multiply every prompt's length")
    add("--output-scale", type=float, default=1.0, metavar="X", help="multiply every answer's length")
    add("--max-input-len", type=int, metavar="N", help="cut prompts to this length, after scaling")
    add("--max-output-len", type=int, metavar="N", help="cut answers to this length, after scaling")
    add("--tokenizer", metavar="PATH", help="counts tokens of `sharegpt` texts (default: the server does)")
    add("--vocab-size", type=int, metavar="N", help="of generated prompts (default: the server's, or 1000 over HTTP)")
    add(
        "--num-warmups",
        "--warmups",
        type=int,
        default=0,
        metavar="N",
        help="requests sent before measuring, one by one",
    )


def _add_arrivals(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--request-rate", type=float, default=math.inf, metavar="R", help="requests per second (default: inf, at once)")
    add("--burstiness", type=float, default=1.0, metavar="B", help="1: Poisson; less is burstier; inf: fixed gaps")
    add("--max-concurrency", type=int, metavar="N", help="hold requests back so that at most N are in flight")
    add("--ramp-up-strategy", choices=get_args(RampShape), help="change the rate over the run")
    add("--ramp-up-start-rps", type=float, metavar="R")
    add("--ramp-up-end-rps", type=float, metavar="R")
    add("--time-scale", type=float, default=1.0, metavar="X", help="multiply a trace's gaps; 0.5 replays twice as fast")


def _add_decoding(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--ignore-eos", action="store_true", help="generate exactly as many tokens as asked for")
    add("--temperature", type=float, default=0.0, help="(default: 0, greedy)")
    add("--top-p", type=float)
    add("--top-k", type=int)
    add("--sampling-seed", type=int, metavar="N", help="of sampled answers")
    add("--extra-body", default="{}", metavar="JSON", help="fields added to every HTTP request body")


def _add_output(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--percentile-metrics", default=",".join(METRICS), metavar="LIST", help="(default: ttft,tpot,itl,e2el)")
    add("--metric-percentiles", default="95,99", metavar="LIST", help="(default: 95,99)")
    add(
        "--goodput", nargs="+", default=[], metavar="NAME:MS", help="limits that a good request meets: ttft, tpot, e2el"
    )
    add("--save-result", action="store_true", help="write a JSON file")
    add("--save-detailed", action="store_true", help="write it with every request in it")
    add("--result-dir", type=Path, default=Path(), metavar="DIR")
    add("--result-filename", metavar="FILE", help="(default: {label}-{rate}qps-{model}-{date}.json)")
    add("--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="added to the JSON file")
    add("--label", help="names the run in the JSON file and its name")
    add("--plot", type=Path, metavar="FILE.png", help="draw the run (needs matplotlib)")
    add("--disable-progress", "--disable-tqdm", action="store_true", help="no progress bar")


def from_args(args: argparse.Namespace) -> Options:
    """Raises OptionError with a sentence that names the flag."""
    for flag, value in _positive(args).items():
        if value is not None and not value > 0:
            raise OptionError(f"--{flag} must be above 0 (got {value})")
    if args.dataset_name in FILE_DATASETS and args.dataset_path is None:
        raise OptionError(f"--dataset-name {args.dataset_name} needs --dataset-path")
    if args.num_warmups < 0 or args.timeout < 0:
        raise OptionError("--num-warmups and --timeout cannot be negative")
    chat = args.backend == "openai-chat"
    return Options(
        backend=args.backend,
        base_url=args.base_url or f"http://{args.host}:{args.port or 8000}",
        address=f"{args.host}:{args.port or 8001}",
        endpoint=args.endpoint or ("/v1/chat/completions" if chat else "/v1/completions"),
        model=args.model,
        api_key=args.api_key or os.environ.get("FASTSERVE_API_KEY") or os.environ.get("OPENAI_API_KEY"),
        headers=_pairs("--header", args.header),
        verify_tls=not args.insecure,
        tokenizer=args.tokenizer,
        vocab_size=args.vocab_size,
        dataset=args.dataset_name,
        dataset_path=args.dataset_path,
        num_prompts=args.num_prompts,
        seed=args.seed,
        input_len=args.input_len,
        output_len=args.output_len,
        range_ratio=args.random_range_ratio,
        shape=Shape(args.input_scale, args.output_scale, args.max_input_len, args.max_output_len),
        time_scale=args.time_scale,
        rate_rps=args.request_rate,
        burstiness=args.burstiness,
        ramp=_ramp(args),
        max_concurrency=args.max_concurrency,
        warmups=args.num_warmups,
        timeout_s=args.timeout or None,
        ready_timeout_s=args.ready_check_timeout_sec,
        decoding=_decoding(args),
        output=_output(args),
    )


def _positive(args: argparse.Namespace) -> dict[str, float | None]:
    names = (
        "num_prompts input_len output_len input_scale output_scale max_input_len max_output_len vocab_size "
        "request_rate burstiness max_concurrency time_scale"
    )
    return {name.replace("_", "-"): getattr(args, name) for name in names.split()}


def _ramp(args: argparse.Namespace) -> Ramp | None:
    if args.ramp_up_strategy is None:
        return None
    if args.ramp_up_start_rps is None or args.ramp_up_end_rps is None:
        raise OptionError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps")
    if not math.isinf(args.request_rate):
        raise OptionError("--ramp-up-strategy and --request-rate exclude each other")
    try:
        return Ramp(args.ramp_up_strategy, args.ramp_up_start_rps, args.ramp_up_end_rps)
    except ValueError as error:
        raise OptionError(f"--ramp-up-start-rps, --ramp-up-end-rps: {error}") from error


def _decoding(args: argparse.Namespace) -> Decoding:
    try:
        extra = json.loads(args.extra_body)
    except ValueError as error:
        raise OptionError(f"--extra-body is not JSON: {error}") from error
    if not isinstance(extra, dict):
        raise OptionError("--extra-body must be a JSON object")
    return Decoding(args.temperature, args.top_p, args.top_k, args.ignore_eos, args.sampling_seed, extra)


def _output(args: argparse.Namespace) -> Output:
    return Output(
        metrics=_metrics(args.percentile_metrics),
        percentiles=_percentiles(args.metric_percentiles),
        slo_ms=parse_goodput(args.goodput),
        save=args.save_result or args.save_detailed,
        detailed=args.save_detailed,
        directory=args.result_dir,
        filename=args.result_filename,
        metadata=_pairs("--metadata", args.metadata),
        label=args.label,
        plot=args.plot,
        progress=not args.disable_progress,
    )


def _metrics(text: str) -> tuple[Metric, ...]:
    names = [part.strip() for part in text.split(",") if part.strip()]
    for name in names:
        if name not in METRICS:
            raise OptionError(f"--percentile-metrics: {name!r} is not one of {', '.join(METRICS)}")
    return tuple(metric for metric in METRICS if metric in names)


def _percentiles(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise OptionError(f"--metric-percentiles: {text!r} is not a list of numbers") from None
    if not all(0 <= value <= 100 for value in values):
        raise OptionError(f"--metric-percentiles must be between 0 and 100 (got {text!r})")
    return values


def parse_goodput(parts: Sequence[str]) -> dict[str, float]:
    """`["ttft:200", "tpot:50"]` in ms. Raises OptionError."""
    limits: dict[str, float] = {}
    for part in parts:
        name, _, text = part.partition(":")
        try:
            limits[name] = float(text)
        except ValueError:
            raise OptionError(f"--goodput: {part!r} is not NAME:MS") from None
        if name not in SLO_NAMES or not limits[name] > 0:
            raise OptionError(f"--goodput: {part!r} is not one of {', '.join(SLO_NAMES)} with a limit above 0")
    return limits


def _pairs(flag: str, parts: Sequence[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise OptionError(f"{flag}: {part!r} is not KEY=VALUE")
        pairs[key] = value
    return pairs
