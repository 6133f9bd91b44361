"""Which processes make up a running system and how each is started. Pure: settings in, command lines out."""

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fastserve.cli.settings import EngineSettings, ServeSettings
from fastserve_common.lifecycle import SUPERVISOR_PID_ENV
from fastserve_common.settings import ENV_PREFIX
from fastserve_common.state import rank_member

NODE = "local"

#: What every service needs of its environment. Threads that wait must not spin, and large messages must come from
#: the heap: mapping and unmapping them costs three times as much as sending them.
SERVICE_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "2147483647",
    "MALLOC_TOP_PAD_": "67108864",
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True, slots=True)
class Model:
    """A prepared model: the folder to load, and what it was asked for by."""

    model_dir: Path
    root: str
    #: Ids are below this; None: the folder does not say.
    vocab_size: int | None = None


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One process. It is ready when it is `member` (empty: any) of `role` in the cluster state."""

    name: str
    role: str
    member: str
    argv: tuple[str, ...]
    #: How long its orderly end may take.
    stop_s: float
    environment: Mapping[str, str] = field(default_factory=dict)
    #: Where its standard output goes; None: to its log, with the rest.
    stdout_path: Path | None = None


#: Time for the orderly end of a service that has nothing to drain, and on top of the drain of one that has.
STOP_MARGIN_S = 10.0


def module_argv(module: str, *flags: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "fastserve_common.supervised", module, *flags)


def child_environment(spec_environment: Mapping[str, str], inherited: Mapping[str, str]) -> dict[str, str]:
    """What a child starts with: the inherited environment wins over our defaults, but settings of this command stay
    here: `FASTSERVE_PORT` means the port of `fastserve serve`, and the services get theirs as flags."""
    ours = {f"{ENV_PREFIX}{name.upper()}" for name in (*ServeSettings.model_fields, "config", "listen", "state")}
    kept = {key: value for key, value in inherited.items() if key not in ours}
    return {**SERVICE_ENVIRONMENT, **kept, **spec_environment, SUPERVISOR_PID_ENV: str(os.getpid())}


#: A block of a fake stage is as small as its token ids: a gibibyte would be millions of slots to keep account of.
FAKE_KV_BYTES = 4 << 20


def kvstores(settings: ServeSettings, state_url: str) -> tuple[ChildSpec, ...]:
    """One per pipeline, as if each were a node of its own: stages of two pipelines cannot share an arena."""
    specs = (kvstore(settings, state_url, replica) for replica in range(settings.replicas))
    return tuple(spec for spec in specs if spec is not None)


def node(replica: int) -> str:
    return NODE if replica == 0 else f"{NODE}-{replica}"


def kvstore(settings: ServeSettings, state_url: str, replica: int = 0) -> ChildSpec | None:
    """None when no host memory is given: preempted requests are computed again then."""
    if settings.host_kv_memory == 0:
        return None
    flags = [
        f"--node={node(replica)}",
        f"--host-kv-memory={_kv_bytes(settings, settings.host_kv_memory // settings.replicas)}",
        f"--lock-memory={_lock_memory(settings)}",
    ]
    if settings.kv_lease_ttl is not None:
        flags.append(f"--lease-ttl-s={settings.kv_lease_ttl}")
    if settings.metrics_port:
        flags.append(f"--metrics-listen=127.0.0.1:{settings.metrics_port + 1 + replica}")
    argv = module_argv("fastserve_kvstore", *_common(settings, state_url), *flags)
    name = "kvstore" if replica == 0 else f"kvstore-{replica}"
    return ChildSpec(name, "kvstore", node(replica), argv, STOP_MARGIN_S)


def workers(settings: EngineSettings, state_url: str, model: Model) -> tuple[ChildSpec, ...]:
    shared = [
        *_common(settings, state_url),
        f"--model-dir={model.model_dir}",
        f"--num-stages={settings.stages}",
        *_given(settings, "device", "dtype", "linear", "block_size", "max_model_len"),
        *_threads(settings),
        f"--kv-memory={_kv_bytes(settings, settings.kv_memory)}",
        *(["--kv-checksums"] if isinstance(settings, ServeSettings) and settings.kv_checksums else []),
        *(_fake(settings, model) if settings.fake else []),
    ]
    return tuple(
        _worker(settings, shared, replica, stage, rank)
        for replica in range(settings.replicas)
        for stage in range(settings.stages)
        for rank in range(settings.tensor_parallel_size)
    )


def _worker(settings: EngineSettings, shared: Sequence[str], replica: int, stage: int, rank: int) -> ChildSpec:
    name, role = rank_member(replica, stage, rank), "rank" if rank else "stage"
    which = [f"--stage={stage}", f"--node={node(replica)}", *([f"--replica={replica}"] if replica else [])]
    size = settings.tensor_parallel_size
    which += [f"--tensor-parallel-size={size}", f"--tensor-parallel-rank={rank}"] if size > 1 else []
    if rank == 0:  # which counts for all
        which += _stage_metrics(settings, replica, stage)
    return ChildSpec(name, role, name, module_argv("fastserve_worker", *shared, *which), STOP_MARGIN_S)


def _threads(settings: EngineSettings) -> Iterable[str]:
    """A worker divides the cores among the stages of its own pipeline; others are not its business."""
    if settings.threads is not None:
        yield f"--threads={settings.threads}"
    elif settings.replicas > 1:
        cores = len(os.sched_getaffinity(0))
        processes = settings.stages * settings.replicas * settings.tensor_parallel_size
        yield f"--threads={max(1, cores // processes)}"


def _stage_metrics(settings: EngineSettings, replica: int, stage: int) -> Iterable[str]:
    """Above the scheduler's and the kvstores'; a profile run has none."""
    if isinstance(settings, ServeSettings) and settings.metrics_port:
        above = 1 + settings.replicas + replica * settings.stages + stage
        yield f"--metrics-listen=127.0.0.1:{settings.metrics_port + above}"


def _kv_bytes(settings: EngineSettings, given: int) -> int:
    return min(given, FAKE_KV_BYTES) if settings.fake else given


def _fake(settings: EngineSettings, model: Model) -> list[str]:
    """Fake stages take and say the ids of the tokenizer that the gateway works with."""
    vocabulary = [f"--fake-vocab-size={model.vocab_size}"] if model.vocab_size is not None else []
    return ["--fake", *_given(settings, "fake_iteration_ms", "fake_token_us"), *vocabulary]


_SCHEDULER_FLAGS = (
    "policy",
    "preset",
    "alpha_ms",
    "alpha_rounds",
    "promotion",
    "quantum_ratio",
    "num_queues",
    "probe_tokens",
    "slo_first_token_ms",
    "slo_token_ms",
    "replica_patience",
    "kv_policy",
    "kv_ranking",
    "swap_min_batches",
    "swap_reserve_min_percent",
    "swap_reserve_max_percent",
    "journal",
    "timeline",
    "vllm_metric_names",
    "max_num_batched_tokens",
    "prefill_chunk_tokens",
    "max_num_queued_reqs",
    "max_num_queued_tokens",
    "drain_timeout",
)


def scheduler(settings: ServeSettings, state_url: str, model: Model) -> ChildSpec:
    flags = [*_scheduler_base(settings, state_url), *_given(settings, *_SCHEDULER_FLAGS)]
    flags += [f"--served-model-name={name}" for name in _names(settings, model)]
    if settings.metrics_port:
        flags.append(f"--metrics-port={settings.metrics_port}")
    argv = module_argv("fastserve_scheduler", *flags)
    return ChildSpec("scheduler", "scheduler", "leader", argv, settings.drain_timeout + STOP_MARGIN_S)


def profile_argv(settings: EngineSettings, state_url: str) -> tuple[str, ...]:
    return module_argv("fastserve_scheduler", *_scheduler_base(settings, state_url), "--profile-only")


_GATEWAY_FLAGS = (
    "ssl_certfile",
    "ssl_keyfile",
    "api_key_file",
    "rate_limit_requests_per_min",
    "rate_limit_tokens_per_min",
    "max_concurrent_requests",
    "max_concurrent_requests_per_key",
    "request_timeout",
    "dashboard",
    "vllm_metric_names",
    "max_model_len",
    "seed",
    "drain_timeout",
)


def gateway(settings: ServeSettings, state_url: str, model: Model, *, port: int, grpc_port: int) -> ChildSpec:
    """`port` and `grpc_port` are given apart: a gateway that is started again listens where it did before."""
    flags = [
        *_common(settings, state_url, listens=False),
        f"--model-dir={model.model_dir}",
        f"--model-root={model.root}",
        *(f"--served-model-name={name}" for name in _names(settings, model)),
        f"--host={settings.host}",
        f"--port={port}",
        f"--grpc-port={grpc_port}",
        *_given(settings, *_GATEWAY_FLAGS),
    ]
    # Not on the command line, where every user of the machine could read them.
    secrets = {f"{ENV_PREFIX}API_KEY": ",".join(settings.api_key)} if settings.api_key else {}
    argv = module_argv("fastserve_gateway", *flags)
    return ChildSpec("gateway", "gateway", "", argv, settings.drain_timeout + STOP_MARGIN_S, secrets)


def _names(settings: ServeSettings, model: Model) -> tuple[str, ...]:
    """What the model is called in the API and in metrics."""
    return settings.served_model_name or (model.root,)


def _scheduler_base(settings: EngineSettings, state_url: str) -> list[str]:
    return [
        *_common(settings, state_url),
        f"--num-stages={settings.stages}",
        *([f"--num-replicas={settings.replicas}"] if settings.replicas > 1 else []),
        *_given(settings, "max_num_seqs", "max_model_len", "profile_dir"),
    ]


def _common(settings: EngineSettings, state_url: str, *, listens: bool = True) -> Iterable[str]:
    yield f"--state={state_url}"
    yield f"--log-level={'debug' if settings.log_level == 'debug' else 'info'}"
    yield f"--log-format={settings.log_format}"
    yield from _given(settings, "tls_cert", "tls_key", "tls_ca")
    if settings.tls_cert is not None:
        yield f"--tls-name={settings.tls_name}"
    if settings.otlp_endpoint:
        yield f"--otlp-endpoint={settings.otlp_endpoint}"
    if listens:
        yield "--listen=127.0.0.1:0"


def _given(settings: EngineSettings, *names: str) -> Iterable[str]:
    """Flags of the same name in the service; None is left to the service's own default."""
    for name in names:
        value, flag = getattr(settings, name), name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        elif value is not None:
            yield f"--{flag}={value}"


def _lock_memory(settings: ServeSettings) -> str:
    """Devices copy faster from locked pages; on a CPU they buy nothing."""
    return "prefer" if settings.device == "cuda" else "off"
