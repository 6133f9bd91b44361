"""What `fastserve serve` and `fastserve profile` can be told.

A setting that is None is left to the service it belongs to. Names of policies are repeated here so that a wrong one
is refused before anything starts; a test compares them with the services' own tables.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from fastserve_common.logs import LogLevel
from fastserve_common.tls import ClusterSettings
from fastserve_common.units import GIB, SizeBytes, format_bytes

DEMO_MODEL = "smollm2-135m-instruct"

MAX_PORT = 65535
#: More stages than this on one machine is a typing mistake.
MAX_STAGES = 64
MAX_RANKS = 8

Policy = Literal[
    "skip-join-mlfq",
    "fcfs",
    "batch-fcfs",
    "round-robin",
    "fixed-priority",
    "naive-mlfq",
    "srpt",
    "slack",
    "las",
    "sjf",
    "edf",
    "plas",
    "predicted",
]
KvPolicy = Literal["proactive", "reactive", "blocking", "recompute", "defer"]
KvRanking = Literal["enst", "order"]
Preset = Literal["default", "paper"]
Promotion = Literal["reset", "return"]
Device = Literal["cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
Linear = Literal["auto", "torch", "packed", "fp16"]

_MIN_KV_BYTES = 1024 * 1024

#: Under these headings `--help` lists the settings.
_GROUPS: Mapping[str, Sequence[str]] = {
    "model": (
        *(
            "stages",
            "tensor_parallel_size",
            "replicas",
            "replica_patience",
            "device",
            "dtype",
            "linear",
            "threads",
            "max_model_len",
        ),
        *("served_model_name", "seed", "profile_dir"),
    ),
    "callers": (
        *("host", "port", "grpc_port", "ssl_certfile", "ssl_keyfile", "api_key", "api_key_file"),
        *("rate_limit_requests_per_min", "rate_limit_tokens_per_min"),
        *("max_concurrent_requests", "max_concurrent_requests_per_key"),
        *("max_num_queued_reqs", "max_num_queued_tokens", "request_timeout", "dashboard"),
    ),
    "batches": ("max_num_seqs", "max_num_batched_tokens", "prefill_chunk_tokens"),
    "order of requests": (
        *("policy", "preset", "alpha_ms", "alpha_rounds", "promotion", "quantum_ratio", "num_queues"),
        *("probe_tokens", "slo_first_token_ms", "slo_token_ms"),
    ),
    "KV memory": (
        *("kv_memory", "block_size", "host_kv_memory", "kv_policy", "kv_ranking", "swap_min_batches"),
        *("swap_reserve_min_percent", "swap_reserve_max_percent", "kv_checksums", "kv_lease_ttl"),
    ),
    "running it": (
        *("run_dir", "drain_timeout", "log_level", "log_format", "metrics_port", "vllm_metric_names", "journal"),
        *("timeline", "otlp_endpoint"),
    ),
    "certificates of the services among themselves": ("tls_cert", "tls_key", "tls_ca", "tls_name"),
    "without a model": ("fake", "fake_iteration_ms", "fake_token_us"),
}


class EngineSettings(ClusterSettings):
    """What is needed to run the stages of a model."""

    groups: ClassVar[Mapping[str, Sequence[str]]] = _GROUPS

    log_level: LogLevel = Field("warning", description="which lines of the services to show; their files have all")

    model: str = Field(DEMO_MODEL, description="folder, GGUF file or name of the model")
    stages: int = Field(2, ge=1, le=MAX_STAGES, description="pipeline stages, one process each")
    tensor_parallel_size: int = Field(
        1, ge=1, le=MAX_RANKS, description="processes that share each layer of a stage; on cuda a device each"
    )
    replicas: int = Field(1, ge=1, le=MAX_STAGES, description="pipelines of the model, each with all its stages")
    device: Device = Field("cpu", description="cpu or cuda")
    dtype: DType = Field("auto", description="auto, float32, bfloat16 or float16; auto: float32 on cpu")
    linear: Linear = Field("auto", description="kind of linear layers: auto, torch, packed or fp16")
    threads: int | None = Field(None, ge=1, description="threads per stage (default: the cores divided among them)")
    kv_memory: SizeBytes = Field(GIB, description="memory for KV on the device, all stages together")
    block_size: int = Field(16, ge=1, le=1024, description="tokens in a block of KV")
    max_model_len: int | None = Field(None, ge=1, description="longest prompt with its answer (default: the model's)")
    max_num_seqs: int = Field(16, ge=1, description="requests computed together in one iteration")
    profile_dir: Path | None = Field(None, description="where measured profiles are kept")
    run_dir: Path | None = Field(None, description="folder for state and logs (default: a temporary one)")
    fake: bool = Field(False, description="stages without a model that answer known tokens, to try the system out")
    fake_iteration_ms: float = Field(2.0, gt=0, description="with --fake: time of an iteration")
    fake_token_us: float = Field(20.0, gt=0, description="with --fake: more time per token of an iteration")

    @field_validator("kv_memory")
    @classmethod
    def _some_kv(cls, value: int) -> int:
        return _at_least(value, _MIN_KV_BYTES)

    @model_validator(mode="after")
    def _engine_combinations(self) -> Self:
        if self.device == "cpu" and self.dtype == "float16":
            raise ValueError("--dtype: float16 is computed on cuda only; use float32 on cpu")
        if self.fake and self.tensor_parallel_size > 1:
            raise ValueError("--tensor-parallel-size: stages without a model (--fake) have no layers to share")
        if self.device == "cuda" and self.linear in ("packed", "fp16"):
            raise ValueError(f"--linear: {self.linear} is for cpu only; use torch on cuda")
        return self


class ProfileSettings(EngineSettings):
    """Measure how long prefills and decodes of this model take on this machine, and keep the result for `serve`."""


class ServeSettings(EngineSettings):
    """Serve a model on this machine: OpenAI-compatible HTTP and gRPC, with preemptive scheduling behind them."""

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="HTTP port; 0 picks one")
    grpc_port: int | None = Field(None, ge=-1, le=65535, description="gRPC port; -1: off (default: HTTP port + 1)")
    ssl_certfile: Path | None = Field(None, description="TLS certificate chain that callers are shown, HTTP and gRPC")
    ssl_keyfile: Path | None = Field(None, description="its private key")
    api_key: tuple[str, ...] = Field(
        (), repr=False, description="accept only callers with one of these keys, or `sha256:` hashes; repeatable"
    )
    api_key_file: Path | None = Field(None, description="file with more keys or hashes; read again when it changes")
    rate_limit_requests_per_min: int | None = Field(
        None, ge=1, description="requests that one API key may make in a minute (default: no limit)"
    )
    rate_limit_tokens_per_min: int | None = Field(
        None,
        ge=1,
        description="prompt tokens and max_tokens that one API key may ask for in a minute (default: no limit)",
    )
    max_concurrent_requests: int | None = Field(
        None, ge=1, description="answers in progress at once (n counts n); more are refused with 429"
    )
    max_concurrent_requests_per_key: int | None = Field(
        None, ge=1, description="answers of one API key in progress at once (default: no limit of its own)"
    )
    request_timeout: float | None = Field(
        None, gt=0, description="longest life of a request, in seconds (default: no limit)"
    )
    dashboard: bool = Field(True, description="serve the built-in page at /")
    served_model_name: tuple[str, ...] = Field((), description="name in the API (default: the model); repeatable")

    seed: int | None = Field(
        None, description="makes answers to requests without a seed repeatable, in order of arrival"
    )

    max_num_batched_tokens: int | None = Field(None, ge=1, description="tokens computed together in one iteration")
    prefill_chunk_tokens: int | None = Field(None, ge=0, description="cut prompts into pieces of so many; 0: whole")
    host_kv_memory: SizeBytes = Field(GIB, description="host memory for KV of preempted requests; 0: none")

    policy: Policy = Field("predicted", description=f"order of requests: {', '.join(get_args(Policy))}")
    preset: Preset | None = Field(None, description="values of the scheduling parameters: default or paper")
    alpha_ms: float | None = Field(None, gt=0, description="a request that has not run for so long is starving")
    alpha_rounds: int | None = Field(
        None, ge=0, description="it is starving only after so many rounds over all requests, however long"
    )
    promotion: Promotion | None = Field(None, description="what a starving request gets: reset or return")
    quantum_ratio: int | None = Field(None, ge=2, description="quantum of a queue over that of the one above")
    num_queues: int | None = Field(None, ge=0, description="queues; 0: as many as the longest prompt needs")
    probe_tokens: int | None = Field(
        None, ge=1, description="policy predicted: tokens before a request is ranked by its expected length"
    )
    slo_first_token_ms: float | None = Field(
        None, gt=0, description="policies slack and edf: the first token is due so long after arrival"
    )
    slo_token_ms: float | None = Field(
        None, gt=0, description="policies slack and edf: each further token is due so long after the last"
    )
    kv_policy: KvPolicy | None = Field(None, description=f"when KV memory runs out: {', '.join(get_args(KvPolicy))}")
    kv_ranking: KvRanking | None = Field(None, description="whose KV is swapped first: enst or order")
    swap_min_batches: int | None = Field(
        None, ge=0, description="requests displace others only if the pool holds so many running batches"
    )
    swap_reserve_min_percent: int | None = Field(
        None, ge=0, le=50, description="part of the KV memory kept free for new requests, at least"
    )
    swap_reserve_max_percent: int | None = Field(None, ge=0, le=50, description="the same, at most")
    kv_checksums: bool = Field(False, description="check each block of KV that comes back from the host")
    kv_lease_ttl: float | None = Field(
        None, gt=0, description="seconds until host memory of a scheduler that is gone is free again"
    )
    replica_patience: float | None = Field(
        None, ge=0, description="seconds that requests wait for their pipeline before another one takes them"
    )
    journal: Path | None = Field(None, description="write every event of the scheduler here, for `fastserve replay`")
    timeline: Path | None = Field(
        None, description="at the end, write here when stages computed and copied: a trace for Perfetto"
    )
    max_num_queued_reqs: int | None = Field(None, ge=1, description="requests that may wait; more are refused")
    max_num_queued_tokens: int | None = Field(None, ge=1, description="prompt tokens that may wait")

    drain_timeout: float = Field(30.0, ge=0, description="seconds that requests get to finish at the end")
    metrics_port: int = Field(
        0,
        ge=0,
        le=MAX_PORT - 1 - MAX_STAGES,
        description="scheduler's metrics here, kvstore's one above, the stages' from two above on; 0: off",
    )
    vllm_metric_names: bool = Field(
        False,
        description="repeat metrics that vLLM has too under its names, for dashboards and autoscalers made for it",
    )

    @field_validator("host_kv_memory")
    @classmethod
    def _none_or_some(cls, value: int) -> int:
        return value if value == 0 else _at_least(value, _MIN_KV_BYTES)

    @model_validator(mode="after")
    def _certificate_with_key(self) -> Self:
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError("--ssl-certfile and --ssl-keyfile must be given together")
        return self

    @model_validator(mode="after")
    def _serve_combinations(self) -> Self:
        if any(
            not key or "," in key or not key.isascii() or not key.isprintable() or " " in key for key in self.api_key
        ):
            raise ValueError("--api-key: a key must be visible ASCII without spaces and commas")
        if self.grpc_port is not None and self.grpc_port == self.port and self.port > 0:
            raise ValueError(f"--grpc-port: must differ from --port (got {self.port} for both)")
        batched = self.max_num_batched_tokens
        if batched is not None and batched < self.max_num_seqs:
            raise ValueError(f"--max-num-batched-tokens: must be at least --max-num-seqs, {self.max_num_seqs}")
        if batched is not None and self.prefill_chunk_tokens and self.prefill_chunk_tokens > batched:
            raise ValueError(f"--prefill-chunk-tokens: must not exceed --max-num-batched-tokens, {batched}")
        return self

    @model_validator(mode="after")
    def _scheduling_combinations(self) -> Self:
        low, high = self.swap_reserve_min_percent, self.swap_reserve_max_percent
        if low is not None and high is not None and high < low:
            raise ValueError(f"--swap-reserve-max-percent: must not be below --swap-reserve-min-percent, {low}")
        queued, longest = self.max_num_queued_tokens, self.max_model_len
        if queued is not None and longest is not None and queued < longest:
            raise ValueError(f"--max-num-queued-tokens: must hold one prompt of --max-model-len, {longest}")
        return self

    @property
    def bound_grpc_port(self) -> int:
        """0: picked by the system, -1: none."""
        if self.grpc_port is not None:
            return self.grpc_port
        return self.port + 1 if self.port else 0


def _at_least(value: int, minimum: int) -> int:
    if value < minimum:
        raise ValueError(f"must be at least {format_bytes(minimum)}")
    return value
