"""What the scheduler says about one answer, and what a session tells the API about it. Free of wire types."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from fastserve_common.errors import FastServeError

#: Token ids: `array("I")`.
Ids: TypeAlias = "array[int]"


class StopKind(StrEnum):
    """Why the scheduler ended an answer."""

    STOP_TOKEN = "stop-token"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float
    #: The most likely tokens, most likely first: (token id, log-probability).
    top: Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class TokensArrived:
    ids: Ids
    #: One per id, or none at all.
    logprobs: Sequence[TokenLogprob]
    #: Monotonic clock, when it came in.
    at_s: float


@dataclass(frozen=True, slots=True)
class Ended:
    kind: StopKind
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The scheduler refused it, or it is lost. `outcome`: its name in the metrics. `limit`: what it ran into."""

    error: FastServeError
    outcome: str
    limit: str = ""


AnswerEvent = TokensArrived | Ended | Failed


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Finish:
    reason: FinishReason
    #: What stopped it: a stop string, or a token id other than end-of-sequence.
    stop_string: str | None = None
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class PlacedLogprob:
    """`text_offset`: where in the answer's text the token's own text begins, in characters."""

    entry: TokenLogprob
    text_offset: int


@dataclass(frozen=True, slots=True)
class Delta:
    """What one answer gained. The texts of an answer's deltas add up to its text; the last one has `finish`."""

    index: int
    text: str
    token_ids: Sequence[int] = ()
    logprobs: Sequence[PlacedLogprob] = ()
    finish: Finish | None = None


@dataclass(slots=True)
class Usage:
    """`completion_tokens` counts what the caller got: nothing after a stop string."""

    prompt_tokens: int
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The scheduler as this gateway knows it. Limits stay known while the link is down."""

    connected: bool = False
    ready: bool = False
    #: What is missing, in words, when not ready.
    detail: str = "not connected to a scheduler yet"
    generation: int = 0
    max_model_len: int | None = None
    policy: str = ""
    num_stages: int = 0

    @property
    def serving(self) -> bool:
        return self.connected and self.ready


@dataclass(frozen=True, slots=True)
class Load:
    """What a scheduler has to do, as it said last. `live`: requests that wait or run; `pipelines` share the work."""

    waiting_tokens: int = 0
    live: int = 0
    pipelines: int = 1
    #: Of the model it serves; "": it has not said.
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class Submission:
    """One answer to be generated, as the scheduler is told."""

    wire_id: str
    prompt_ids: Ids = field(repr=False)
    sampling: bytes = field(repr=False)
    max_tokens: int
    min_tokens: int
    stop_token_ids: frozenset[int]
    priority: int
    #: Every token comes with its log-probability.
    logprobs: bool
    #: W3C trace context of the request's span; "": not traced.
    traceparent: str = ""
    #: The caller's guess of the answer's length; 0: none.
    expected_output_tokens: int = 0
    program: str = ""
