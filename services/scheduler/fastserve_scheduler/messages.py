"""What the scheduler says to gateways and stages and hears from them, free of wire types.

Sampling parameters and log probabilities pass through the scheduler unread: they stay encoded bytes here.
"""

from array import array
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, TypeAlias

from fastserve_scheduler.kv_messages import NO_HOST, HostArena

Ids: TypeAlias = "array[int]"
"""Token ids: `array("I")`."""


# --- gateway -> scheduler


@dataclass(frozen=True, slots=True)
class GatewayHello:
    gateway_id: str
    accepts_batches: bool = False


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request's tokens are drawn. `encoded` goes to the last stage as it came; empty: greedy."""

    encoded: bytes = b""
    #: Some penalty is on: the last stage needs the ids so far.
    needs_history: bool = False
    #: Its tokens come with log-probabilities. Those of a batch mate that asked are none of its business.
    logprobs: bool = False


@dataclass(frozen=True, slots=True)
class Submit:
    """A request. `delivered` are ids an earlier scheduler already streamed: output that is not sent again."""

    request_id: str
    prompt: Ids
    delivered: Ids
    sampling: Sampling
    max_tokens: int
    min_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()
    priority: int = 0
    service_class: str = ""
    oracle_tokens: int = 0
    expected_output_tokens: int = 0
    program: str = ""
    #: Trace context of the gateway's span; "": it is not traced.
    traceparent: str = ""


class CancelReason(StrEnum):
    CLIENT = "client"
    STOP_STRING = "stop-string"


@dataclass(frozen=True, slots=True)
class Cancel:
    request_id: str
    reason: CancelReason


@dataclass(frozen=True, slots=True)
class UnknownMessage:
    """A message of a newer peer: tolerated, not acted on."""


GatewayMessage = GatewayHello | Submit | Cancel | UnknownMessage


# --- scheduler -> gateway


@dataclass(frozen=True, slots=True)
class Hello:
    generation: int
    max_model_len: int
    max_request_tokens: int
    policy: str
    num_stages: int


@dataclass(frozen=True, slots=True)
class Load:
    """What there is to do. `live`: requests that wait or run; `pipelines`: those that serve; `accepted`: ever."""

    waiting_prompt_tokens: int
    live: int
    pipelines: int
    fingerprint: str
    accepted: int


class Tokens(NamedTuple):
    """`token_ids` packed; `offset`: output position of the first. `logprobs`: one encoded entry per id, or none."""

    request_id: str
    offset: int
    token_ids: bytes
    logprobs: tuple[bytes, ...] = ()


class StopReason(StrEnum):
    STOP_TOKEN = "stop-token"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"
    STOP_STRING = "stop-string"
    #: Another replica goes on with it; no gateway is told.
    MOVED = "moved"


@dataclass(frozen=True, slots=True)
class Finished:
    request_id: str
    reason: StopReason
    stop_token_id: int
    output_tokens: int
    preemptions: int


class Refusal(StrEnum):
    TOO_LONG = "too-long"
    QUEUE_FULL_REQUESTS = "max-num-queued-reqs"
    QUEUE_FULL_TOKENS = "max-num-queued-tokens"
    DUPLICATE_ID = "duplicate-id"
    NOT_READY = "not-ready"
    DRAINING = "draining"
    INVALID = "invalid"


@dataclass(frozen=True, slots=True)
class Rejected:
    """`retry_after_ms` 0: do not retry."""

    request_id: str
    reason: Refusal
    message: str
    retry_after_ms: int = 0


@dataclass(frozen=True, slots=True)
class Status:
    ready: bool
    detail: str = ""


RequestMessage = Tokens | Finished | Rejected


@dataclass(frozen=True, slots=True)
class Batch:
    """Several messages in one: a stream message costs about as much as sixteen of these."""

    messages: tuple[RequestMessage, ...]


SchedulerMessage = Hello | Status | Load | RequestMessage | Batch


# --- scheduler -> stage


@dataclass(frozen=True, slots=True)
class Configure:
    epoch: int
    next_stage_address: str


class WireItem(NamedTuple):
    """One job's share of a plan with its ids; all id lists packed. `history`: (prompt, output) for penalties."""

    job_id: int
    start: int
    num_tokens: int
    block_table: bytes
    token_ids: bytes
    sample: bool
    sampling: bytes
    output_position: int
    suppressed: bytes
    history: tuple[bytes, bytes]


@dataclass(frozen=True, slots=True)
class WireSwap:
    """Copies of a job's blocks: `device_blocks`[i] to `host_slots`[i] when `out`, else back; both packed."""

    swap_id: int
    job_id: int
    out: bool
    device_blocks: bytes
    host_slots: bytes


@dataclass(frozen=True, slots=True)
class WirePlan:
    """Without items it is there for its swaps. `host_generation`: of the arena that their slots are of."""

    seq: int
    epoch: int
    items: tuple[WireItem, ...]
    swaps: tuple[WireSwap, ...] = ()
    host_generation: int = 0


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement: `num_sequences` sequences of `new_tokens` each after `context_tokens` each."""

    num_sequences: int
    new_tokens: int
    context_tokens: int


@dataclass(frozen=True, slots=True)
class Measure:
    """Order to a stage to time itself at `points`."""

    profile_id: int
    epoch: int
    points: tuple[Point, ...]


ControlMessage = Configure | WirePlan | Measure


# --- stage -> scheduler


@dataclass(frozen=True, slots=True)
class Ready:
    """Answer to Configure: what the stage is and has."""

    epoch: int
    stage: int
    num_stages: int
    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    fingerprint: str
    kv_block_bytes: int
    device: str
    dtype: str
    host: HostArena = NO_HOST


@dataclass(frozen=True, slots=True)
class Report:
    """`token_ids`: one per sampled item of the plan, from the last stage only."""

    seq: int
    epoch: int
    stage: int
    compute_ns: int
    total_compute_ns: int
    token_ids: Ids
    logprobs: tuple[bytes, ...] = ()
    #: By the stage's monotonic clock, after `wait_ns` for copies; 0: it did not say.
    begin_ns: int = 0
    wait_ns: int = 0


@dataclass(frozen=True, slots=True)
class SwapReport:
    """One stage's copy has landed, or has failed with `error`. `begin_ns` 0: it never began, or did not say when."""

    swap_id: int
    epoch: int
    stage: int
    num_bytes: int
    copy_ns: int
    error: str = ""
    begin_ns: int = 0


@dataclass(frozen=True, slots=True)
class Fault:
    """The stage could not carry out plan `seq`."""

    seq: int
    epoch: int
    message: str


@dataclass(frozen=True, slots=True)
class Measured:
    profile_id: int
    stage: int
    compute_ns: tuple[int, ...]


StageMessage = Ready | HostArena | Report | SwapReport | Fault | Measured | UnknownMessage
