"""What `fastserve simulate` can be told: all that the scheduler can, and the system and load it is simulated with."""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from fastserve_common.load.lengths import MODELS as LENGTHS
from fastserve_common.load.traces import READERS
from fastserve_common.tls import ClusterSettings
from fastserve_common.units import SizeBytes
from fastserve_scheduler.core.config import CoreConfig
from fastserve_scheduler.core.policies import POLICIES
from fastserve_scheduler.messages import Ready
from fastserve_scheduler.settings import SchedulerSettings
from fastserve_scheduler.sim.devices import DEVICES
from fastserve_scheduler.sim.models import MODELS
from fastserve_scheduler.sim.report import SLO_NAMES
from fastserve_scheduler.sim.router import ROUTERS

LIVE_ONLY = frozenset(ClusterSettings.model_fields) | {
    "state",
    "listen",
    "advertise",
    "num_stages",
    "profile_dir",
    "profile_only",
    "group",
    "journal",
    "journal_file_size",
    "journal_files",
    "journal_keep",
    "metrics_port",
    "metrics_host",
    "reattach_grace",
    "startup_hold",
    "drain_timeout",
    "stall_timeout",
    "swap_timeout",
    "max_faults",
}
"""Settings of a running scheduler that mean nothing here."""

DEFAULT_MODEL, DEFAULT_DEVICE, DEFAULT_LOAD = "opt-13b", "a100-80", 0.7

Shape = Literal["steady", "bursts", "diurnal", "steps", "programs"]


class SimulateSettings(SchedulerSettings):
    """Serve a simulated load with the real scheduler on a simulated system, and measure as `fastserve bench` does."""

    hidden: ClassVar[frozenset[str]] = LIVE_ONLY

    state: str = Field("", description="none")

    model: str = Field("", description=f"{', '.join(MODELS)} (default: {DEFAULT_MODEL}, or none with --profile)")
    device: str = Field(DEFAULT_DEVICE, description=f"each rank of each stage: {', '.join(DEVICES)}")
    tp: int = Field(1, ge=1, description="tensor-parallel ranks of a stage")
    pp: int = Field(1, ge=1, le=64, description="pipeline stages")
    profile: Path | None = Field(None, description="times measured by `fastserve profile`, instead of --device")
    stage_share: tuple[float, ...] = Field((), description="--profile: share of an iteration of each stage; repeatable")
    turn_us: float = Field(0.0, ge=0, description="control between two iterations, beside the computing")
    turn_job_us: float = Field(0.0, ge=0, description="the same for each request of the batch")
    hop_us: float = Field(0.0, ge=0, description="control from a stage to the next")
    kv_memory: SizeBytes | None = Field(None, ge=1, description="for KV on all devices (default: what weights leave)")
    kv_tokens: int | None = Field(None, ge=1, description="the same in tokens of KV")
    host_kv_memory: SizeBytes = Field(0, ge=0, description="for swapped KV on the host; 0: none")
    host_kv_tokens: int = Field(0, ge=0, description="the same in tokens of KV")
    link_bandwidth: float | None = Field(None, gt=0, description="GB/s between device and host, each way")
    block_size: int = Field(16, ge=1, le=1024, description="tokens in a block of KV")
    replicas: int = Field(1, ge=1, le=1024, description="pipelines behind the router")
    router: str = Field("least-loaded", description=f"{', '.join(ROUTERS)}")

    workload: Shape = Field("steady", description="steady, bursts, diurnal, steps or programs")
    lengths: str = Field("sharegpt-like", description=f"{', '.join(LENGTHS)} or fixed")
    input_len: int = Field(512, ge=1, description="--lengths fixed: prompt tokens")
    output_len: int = Field(128, ge=1, description="--lengths fixed: answer tokens")
    max_input_len: int | None = Field(None, ge=1, description="cut prompts to this length")
    trace: Path | None = Field(None, description="file of recorded traffic, instead of --workload and --lengths")
    trace_format: str = Field("azure", description=f"of --trace: {', '.join(READERS)}")
    trace_start: float = Field(0.0, ge=0, description="seconds of --trace to skip")
    trace_seconds: float | None = Field(None, gt=0, description="seconds of --trace to play, as recorded")
    rate: float | None = Field(None, gt=0, description="requests (programs) per second; a trace is stretched to it")
    load_share: float | None = Field(
        None, gt=0, description=f"the rate as a share of capacity, which is measured first (default: {DEFAULT_LOAD})"
    )
    burstiness: float = Field(1.0, gt=0, description="1: Poisson; less is burstier; inf: fixed gaps")
    burst_factor: float = Field(3.0, gt=0, description="--workload bursts: times the rate")
    burst_seconds: float = Field(10.0, gt=0, description="--workload bursts: length of one")
    burst_every: float = Field(60.0, gt=0, description="--workload bursts: from one to the next")
    rate_step: tuple[str, ...] = Field(
        (), description="--workload steps: SECONDS:FACTOR, times the rate for so long; repeatable, the last one stays"
    )
    swing: float = Field(0.8, ge=0, le=1, description="--workload diurnal: the rate goes from 1 - SWING to 1 + SWING")
    period: float = Field(86_400.0, gt=0, description="--workload diurnal: seconds of a day")
    mean_calls: float = Field(4.0, ge=1, description="--workload programs: calls of one")
    think_time: float = Field(1.0, ge=0, description="--workload programs: mean seconds between answer and next call")
    limits: Literal["unknown", "exact"] = Field(
        "unknown", description="max_tokens of the callers: all there is room for, or the answer's true length"
    )
    hint_error: float | None = Field(None, ge=0, description="callers send hints with this deviation of the logarithm")
    num_requests: int = Field(1000, ge=1, description="requests (programs) that arrive at most")
    duration: float | None = Field(None, gt=0, description="seconds after which no more arrive")
    seed: int = Field(0, description="of everything drawn")

    compare: str = Field("", description="policies with a comma between: the same load under each, in one table")
    slo: tuple[str, ...] = Field((), description=f"NAME:MS, a limit of a good request: {', '.join(SLO_NAMES)}")
    drop_first: float = Field(0.0, ge=0, lt=1, description="share of the requests that latencies leave out: first")
    drop_last: float = Field(0.0, ge=0, lt=1, description="the same of the last")
    output: Path | None = Field(None, description="write the result as JSON")
    detailed: bool = Field(False, description="with every request in it")
    plot: Path | None = Field(None, description="draw latencies to a picture (needs matplotlib)")
    record: Path | None = Field(None, description="write the first replica's events, for `fastserve replay`")
    progress: bool = Field(True, description="show how far it is")

    @field_validator(
        "model", "device", "lengths", "router", "trace_format", "compare", "slo", "stage_share", "rate_step"
    )
    @classmethod
    def _known(cls, value: object, info: ValidationInfo) -> object:
        _CHECKS[info.field_name or ""](value)
        return value

    @model_validator(mode="after")
    def _simulated_together(self) -> Self:
        exclusive = (("rate", "load_share"), ("kv_memory", "kv_tokens"), ("host_kv_memory", "host_kv_tokens"))
        for one, other in exclusive:
            if getattr(self, one) and getattr(self, other):
                raise ValueError(f"{_flag(one)} and {_flag(other)} exclude each other")
        if self.drop_first + self.drop_last >= 1:
            raise ValueError("--drop-first and --drop-last leave nothing to measure")
        if self.stage_share and self.profile is None:
            raise ValueError("--stage-share: stages of a --profile only")
        if self.stage_share and len(self.stage_share) != self.pp:
            raise ValueError(f"--stage-share: must be given --pp times ({self.pp})")
        if self.record is not None and self.compare:
            raise ValueError("--record: of one policy only, not with --compare")
        if bool(self.rate_step) != (self.workload == "steps"):
            raise ValueError("--workload steps and --rate-step need each other")
        if self.burst_seconds >= self.burst_every:
            raise ValueError("--burst-seconds must be below --burst-every")
        return self

    @property
    def policies(self) -> tuple[str, ...]:
        """What to run, one after the other."""
        return tuple(self.compare.split(",")) if self.compare else (self.policy,)

    def slo_ms(self) -> dict[str, float]:
        return dict(_slo(part) for part in self.slo)

    def rate_steps(self) -> list[tuple[float, float]]:
        """(seconds, times the rate)."""
        return [_rate_step(part) for part in self.rate_step]

    def core(self, max_model_len: int, kv_block_bytes: int) -> CoreConfig:
        """Raises SettingsError when the system cannot serve what was asked for."""
        ready = Ready(1, 0, 1, 1, self.block_size, max_model_len, 0, "", kv_block_bytes, "", "")
        return replace(self.core_config([ready]), num_stages=self.pp)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _slo(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    try:
        limit_ms = float(limit)
    except ValueError:
        limit_ms = 0.0
    if name not in SLO_NAMES or not limit_ms > 0 or math.isinf(limit_ms):
        raise ValueError(f"expected NAME:MS with one of {', '.join(SLO_NAMES)} and a limit above 0")
    return name, limit_ms


def _rate_step(text: str) -> tuple[float, float]:
    seconds, _, factor = text.partition(":")
    try:
        step = float(seconds), float(factor)
    except ValueError:
        step = 0.0, 0.0
    if not (step[0] > 0 and step[1] >= 0 and math.isfinite(step[0]) and math.isfinite(step[1])):
        raise ValueError("expected SECONDS:FACTOR with seconds above 0 and a factor of 0 or more")
    return step


def _among(*known: str) -> Callable[[object], None]:
    def check(value: object) -> None:
        if value not in known:
            raise ValueError(f"must be one of {', '.join(name for name in known if name)}")

    return check


def _all_among(*known: str) -> Callable[[object], None]:
    check = _among(*known)

    def check_all(value: object) -> None:
        for name in str(value).split(",") if value else ():
            check(name)

    return check_all


def _limits(value: object) -> None:
    assert isinstance(value, Iterable)
    names = [_slo(str(part))[0] for part in value]
    if len(set(names)) < len(names):
        raise ValueError("a name is given twice")


def _rate_steps(value: object) -> None:
    assert isinstance(value, Iterable)
    steps = [_rate_step(str(part)) for part in value]
    if steps and not steps[-1][1]:
        raise ValueError("the last factor stays and must be above 0")


def _shares(value: object) -> None:
    assert isinstance(value, tuple)
    if value and (min(value) <= 0 or abs(sum(value) - 1) > 1e-6):
        raise ValueError("must be above 0 and add up to 1")


_CHECKS: dict[str, Callable[[object], None]] = {
    "model": _among("", *MODELS),
    "device": _among(*DEVICES),
    "lengths": _among(*LENGTHS, "fixed"),
    "router": _among(*ROUTERS),
    "trace_format": _among(*READERS),
    "compare": _all_among(*POLICIES),
    "slo": _limits,
    "stage_share": _shares,
    "rate_step": _rate_steps,
}
