"""Everything the scheduler can ask for. A driver (live or simulated) carries these out."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class PlanItem(NamedTuple):
    """One job's share of an iteration: `num_tokens` tokens from position `start`, KV through `block_table`.

    `sample`: draw the token at output position `output_position` after the last of these positions (False for a
    prompt chunk that is not the last). Block ids are positions in every stage's pool alike. There is one for each job
    of each iteration: a named tuple is made in a quarter of the time of a frozen dataclass.
    """

    job_id: int
    start: int
    num_tokens: int
    sample: bool
    output_position: int
    block_table: tuple[int, ...]


class SwapDirection(StrEnum):
    OUT = "out"
    IN = "in"


@dataclass(frozen=True, slots=True)
class SwapOp:
    """Copy `device_blocks[i]` to `host_slots[i]` (OUT) or back (IN), on every stage alike.

    An OUT copy begins when the stage has computed every plan that came before; an IN copy at once. Until every stage
    has reported it (SwapDone), blocks and slots belong to the swap.
    """

    swap_id: int
    job_id: int
    direction: SwapDirection
    device_blocks: tuple[int, ...]
    host_slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RunIteration:
    """The whole truth of an iteration. Without items it only swaps, and its IterationDone comes back at once."""

    seq: int
    epoch: int
    items: tuple[PlanItem, ...]
    swaps: tuple[SwapOp, ...] = ()


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class FinishJob:
    job_id: int
    reason: FinishReason


class RejectReason(StrEnum):
    TOO_LONG = "too-long"
    QUEUE_FULL_JOBS = "queue-full-jobs"
    QUEUE_FULL_TOKENS = "queue-full-tokens"
    NOT_READY = "not-ready"


@dataclass(frozen=True, slots=True)
class RejectJob:
    """Refused at the door; the core keeps no trace of it. `retry_after_ns` 0: retrying cannot help."""

    job_id: int
    reason: RejectReason
    retry_after_ns: int
    limit: int


@dataclass(frozen=True, slots=True)
class RaiseEpoch:
    """Everything in flight is void: stages must drop plans and activations of lower epochs before the next plan."""

    epoch: int


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Call again at `at_ns` at the latest, with Woke. Replaces the wish before it."""

    at_ns: int


@dataclass(frozen=True, slots=True)
class KeepHost:
    """A swap out is complete on every stage: its slots hold the job's KV until FreeHost."""

    job_id: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FreeHost:
    """Slots of earlier KeepHosts hold nothing any more. They stay granted, and a later swap may use them."""

    job_id: int
    slots: tuple[int, ...]


Command = RunIteration | FinishJob | RejectJob | RaiseEpoch | WakeAt | KeepHost | FreeHost
