"""The scheduler's settings, and the core's configuration made from them."""

import socket
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Literal, Self, cast

from pydantic import Field, field_validator, model_validator

from fastserve_common.settings import SettingsError
from fastserve_common.state import DEFAULT_GROUP, GROUP_PATTERN
from fastserve_common.tls import ClusterSettings
from fastserve_common.units import SizeBytes
from fastserve_scheduler.core.config import (
    PRESETS,
    AfterPrefill,
    Charge,
    CoreConfig,
    DemoteWhen,
    KvRanking,
    MlfqConfig,
    Promotion,
)
from fastserve_scheduler.core.kv import KV_POLICIES
from fastserve_scheduler.core.policies import POLICIES
from fastserve_scheduler.journal import KEPT_JOURNALS, LEAST_SEGMENTS, MAX_SEGMENT_BYTES, MAX_SEGMENTS
from fastserve_scheduler.messages import Ready

#: Chunked prefill is on: whole, one long prompt would hold every stream for seconds.
DEFAULT_CHUNK_TOKENS = 512
#: More pipelines than this keep one process too busy; start another scheduler for them.
MAX_REPLICAS = 64
_NS_PER_MS = 1_000_000
_ANY_HOST = ("0.0.0.0", "[::]", "")


def _core_default(name: str) -> str:
    """What the core does when it is not told."""
    return str(next(field.default for field in fields(CoreConfig) if field.name == name))


def _core_int(name: str) -> int:
    return int(_core_default(name))


class SchedulerSettings(ClusterSettings):
    """Decides which request's token is computed next, and on which blocks. One is active; others stand by."""

    state: str = Field(description="state store: sqlite:///path or redis://host:port")
    listen: str = Field("127.0.0.1:0", description="HOST:PORT to listen on; port 0 picks one")
    advertise: str = Field("", description="host that gateways reach this process at; empty: the one it listens on")
    group: str = Field(
        DEFAULT_GROUP, pattern=GROUP_PATTERN, description="group of schedulers and stages; each has a leader of its own"
    )
    num_stages: int = Field(1, ge=1, description="pipeline stages")
    num_replicas: int = Field(1, ge=1, le=MAX_REPLICAS, description="pipelines of the model that this process drives")
    replica_patience: float = Field(
        2.0, ge=0, description="seconds that requests wait for their pipeline before another one takes them"
    )

    policy: str = Field(_core_default("policy"), description=f"order of jobs: {', '.join(POLICIES)}")
    preset: Literal["default", "paper"] = Field("default", description="values of the next nine that are not given")
    alpha_ms: float | None = Field(None, gt=0, description="a job that has not run for so long is starving")
    promotion: Promotion | None = Field(None, description="what a starving job gets: reset or return")
    quantum_ratio: int | None = Field(None, ge=2, description="quantum of a queue over that of the one above")
    num_queues: int | None = Field(None, ge=0, description="queues; 0: as many as the longest prompt needs")
    eta: int | None = Field(None, ge=1, description="queues a job drops when its quantum is used up")
    demote_when: DemoteWhen | None = Field(None, description="used-reaches, used-exceeds or next-would-exceed")
    charge: Charge | None = Field(None, description="what an iteration costs each of its jobs: wall time, or its share")
    after_prefill: AfterPrefill | None = Field(None, description="with the first token, stay or go to the top queue")
    alpha_rounds: int | None = Field(None, ge=0, description="alpha is at least so many rounds over all requests")
    slo_first_token_ms: float = Field(
        300.0, gt=0, description="slack, edf: the first token is due so long after arrival"
    )
    slo_token_ms: float = Field(300.0, gt=0, description="slack, edf: each further token is due so long after the last")
    slack_step_ms: float = Field(5000.0, gt=0, description="slack: due times nearer to each other than this are equal")
    probe_tokens: int = Field(16, ge=1, description="predicted: tokens before a request is ranked by its length")
    service_class: tuple[str, ...] = Field((), description="NAME=MS: a service class and its alpha; repeatable")

    max_num_seqs: int = Field(16, ge=1, description="requests of one iteration")
    max_num_batched_tokens: int = Field(2048, ge=1, description="tokens of one iteration")
    prefill_chunk_tokens: int | None = Field(
        None,
        ge=0,
        description=f"prompt tokens beside a full batch of decodes; 0: whole (default: {DEFAULT_CHUNK_TOKENS} at most)",
    )
    max_model_len: int = Field(0, ge=0, description="longest prompt with its answer; 0: what the stages serve")
    max_num_queued_reqs: int = Field(4096, ge=1, description="requests that may wait")
    max_num_queued_tokens: int = Field(4 << 20, ge=1, description="prompt tokens that may wait")
    kv_policy: str = Field(_core_default("kv_policy"), description=f"when KV memory runs out: {', '.join(KV_POLICIES)}")
    kv_ranking: KvRanking = Field(
        cast(KvRanking, _core_default("kv_ranking")), description="who is swapped first: enst or order"
    )
    swap_min_batches: int = Field(
        _core_int("swap_min_batches"), ge=0, description="requests displace others if the pool holds so many batches"
    )
    swap_reserve_min_percent: int = Field(
        _core_int("swap_reserve_min_percent"), ge=0, le=50, description="least part of the pool kept for newcomers"
    )
    swap_reserve_max_percent: int = Field(
        _core_int("swap_reserve_max_percent"), ge=0, le=50, description="most of the pool kept for newcomers"
    )

    profile_dir: Path = Field(Path("~/.cache/fastserve/profiles"), description="where measured profiles are kept")
    profile_only: bool = Field(False, description="measure a full profile, print where it is, end")
    journal: Path | None = Field(None, description="write every event here, for replay")
    journal_file_size: SizeBytes = Field(MAX_SEGMENT_BYTES, ge=4096, description="of a journal's file; then the next")
    journal_files: int = Field(
        MAX_SEGMENTS, ge=LEAST_SEGMENTS, description="files of one journal, the latest ones; older ones are removed"
    )
    journal_keep: int = Field(KEPT_JOURNALS, ge=0, description="journals of earlier starts that are kept")
    timeline: Path | None = Field(
        None, description="record when stages compute and copy; write it here at the end, as a Chrome trace"
    )
    timeline_spans: int = Field(100_000, ge=1, description="computations and copies of the timeline; the last ones")
    check: bool = Field(False, description="prove the core's invariants after every event")
    metrics_port: int = Field(0, ge=0, le=65535, description="Prometheus metrics over HTTP; 0: off")
    metrics_host: str = Field("127.0.0.1", description="address of the metrics")
    vllm_metric_names: bool = Field(
        False, description="repeat metrics that vLLM has too, and gateways do not, under its prefix, `vllm:`"
    )
    served_model_name: tuple[str, ...] = Field(
        (), description="name of the model in the API, as gateways have it: the first is the label `model_name` there"
    )

    reattach_grace: float = Field(10.0, ge=0, description="seconds that a broken gateway's requests wait for it")
    startup_hold: float = Field(30.0, ge=0, description="seconds that requests wait for the first pipeline")
    drain_timeout: float = Field(30.0, ge=0, description="seconds that requests get to finish on SIGTERM")
    stall_timeout: float = Field(30.0, gt=0, description="seconds without an answer until a stage is given up")
    swap_timeout: float = Field(30.0, gt=0, description="seconds without word of a swap until a stage is given up")
    max_faults: int = Field(3, ge=1, description="stages a request may break by itself before it is failed")

    @field_validator("policy")
    @classmethod
    def _known_policy(cls, value: str) -> str:
        return _one_of(value, tuple(POLICIES))

    @field_validator("kv_policy")
    @classmethod
    def _known_kv_policy(cls, value: str) -> str:
        return _one_of(value, tuple(KV_POLICIES))

    @field_validator("profile_dir", "journal", "timeline")
    @classmethod
    def _home(cls, value: Path | None) -> Path | None:
        return None if value is None else value.expanduser()

    @field_validator("listen")
    @classmethod
    def _host_and_port(cls, value: str) -> str:
        _, colon, port = value.rpartition(":")
        if not colon or not port.isdecimal():
            raise ValueError("expected HOST:PORT")
        return value

    @field_validator("service_class")
    @classmethod
    def _classes(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        names = [_service_class(item)[0] for item in value]
        if len(set(names)) < len(names):
            raise ValueError("a name is given twice")
        return value

    @model_validator(mode="after")
    def _together(self) -> Self:
        if self.chunk_tokens > self.max_num_batched_tokens:
            raise ValueError("--prefill-chunk-tokens must not exceed --max-num-batched-tokens")
        if self.max_num_queued_tokens < self.max_model_len:
            raise ValueError("--max-num-queued-tokens must hold one prompt of --max-model-len")
        if self.swap_reserve_max_percent < self.swap_reserve_min_percent:
            raise ValueError("--swap-reserve-max-percent must not be below --swap-reserve-min-percent")
        if self.vllm_metric_names and not self.vllm_model:
            raise ValueError("--vllm-metric-names needs --served-model-name: those metrics are selected by it")
        return self

    @property
    def vllm_model(self) -> str:
        """The model's name for what is repeated under vLLM's names; empty: nothing is."""
        return self.served_model_name[0] if self.vllm_metric_names and self.served_model_name else ""

    @property
    def chunk_tokens(self) -> int:
        """A long prompt must not stall everybody's next token for as long as it takes."""
        if self.prefill_chunk_tokens is None:
            return min(DEFAULT_CHUNK_TOKENS, self.max_num_batched_tokens)
        return self.prefill_chunk_tokens

    def mlfq_config(self) -> MlfqConfig:
        given = {
            "alpha_ns": None if self.alpha_ms is None else _ns(self.alpha_ms),
            "promotion": self.promotion,
            "ratio": self.quantum_ratio,
            "num_levels": self.num_queues,
            "eta": self.eta,
            "demote_when": self.demote_when,
            "charge": self.charge,
            "after_prefill": self.after_prefill,
            "alpha_rounds": self.alpha_rounds,
        }
        changes = {name: value for name, value in given.items() if value is not None}
        return replace(PRESETS[self.preset], **changes)  # type: ignore[arg-type]  # fields of MlfqConfig by name

    def core_config(self, stages: Sequence[Ready]) -> CoreConfig:
        """For these stages. Raises SettingsError when they cannot serve what was asked for."""
        served = stages[0].max_model_len
        if self.max_model_len > served:
            raise SettingsError(f"--max-model-len: the stages serve at most {served} tokens (got {self.max_model_len})")
        max_model_len = self.max_model_len or served
        self._check_queue(max_model_len)
        try:
            return CoreConfig(
                num_stages=self.num_stages,
                block_size=stages[0].block_size,
                max_batch_size=self.max_num_seqs,
                max_batch_tokens=self.max_num_batched_tokens,
                max_model_len=max_model_len,
                prefill_chunk_tokens=self.chunk_tokens,
                max_waiting_jobs=self.max_num_queued_reqs,
                max_waiting_tokens=self.max_num_queued_tokens,
                policy=self.policy,
                mlfq=self.mlfq_config(),
                service_classes=tuple(_service_class(item) for item in self.service_class),
                kv_policy=self.kv_policy,
                kv_ranking=self.kv_ranking,
                kv_block_bytes=max(ready.kv_block_bytes for ready in stages),
                swap_min_batches=self.swap_min_batches,
                swap_reserve_min_percent=self.swap_reserve_min_percent,
                swap_reserve_max_percent=self.swap_reserve_max_percent,
                slo_first_token_ns=_ns(self.slo_first_token_ms),
                slo_token_ns=_ns(self.slo_token_ms),
                slack_step_ns=_ns(self.slack_step_ms),
                probe_tokens=self.probe_tokens,
            )
        except ValueError as error:
            raise SettingsError(str(error)) from error

    def changed_core_config(self, running: CoreConfig) -> CoreConfig:
        """For a core that runs: only what may change under its jobs does. Raises SettingsError."""
        self._check_queue(running.max_model_len)
        try:
            return replace(
                running,
                max_batch_size=self.max_num_seqs,
                max_batch_tokens=self.max_num_batched_tokens,
                prefill_chunk_tokens=self.chunk_tokens,
                max_waiting_jobs=self.max_num_queued_reqs,
                max_waiting_tokens=self.max_num_queued_tokens,
                policy=self.policy,
                mlfq=self.mlfq_config(),
            )
        except ValueError as error:
            raise SettingsError(str(error)) from error

    def _check_queue(self, max_model_len: int) -> None:
        if self.max_num_queued_tokens < max_model_len:
            raise SettingsError(
                f"--max-num-queued-tokens: must hold one prompt of {max_model_len} tokens"
                f" (got {self.max_num_queued_tokens})"
            )

    def address(self, port: int) -> str:
        """Where others reach a server of ours that listens on `port`."""
        host = self.advertise or self.listen.rpartition(":")[0]
        if host in _ANY_HOST:
            host = socket.gethostbyname(socket.gethostname())
        return f"{host}:{port}"


def _ns(milliseconds: float) -> int:
    return max(1, int(milliseconds * _NS_PER_MS))


def _one_of(value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ValueError(f"must be one of {', '.join(choices)}")
    return value


def _service_class(text: str) -> tuple[str, int]:
    """(name, alpha in ns)."""
    name, equals, alpha_ms = text.partition("=")
    try:
        alpha_ns = int(float(alpha_ms) * _NS_PER_MS)
    except ValueError:
        alpha_ns = 0
    if not name or not equals or alpha_ns < 1:
        raise ValueError("expected NAME=MS with a positive number of milliseconds")
    return name, alpha_ns
