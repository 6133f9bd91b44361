"""Everything that can happen to the scheduler. The core changes only in answer to one of these."""

from dataclasses import dataclass

from fastserve_scheduler.core.config import CoreConfig
from fastserve_scheduler.core.profile import Profile


@dataclass(frozen=True, slots=True)
class JobArrived:
    """A request, as counts: the core never sees a token id.

    `output_tokens` > 0 when the job comes back with tokens already delivered (another scheduler died): they are
    prefilled with the prompt. `oracle_output_tokens` is the true output length, used by `srpt` only.
    `expected_output_tokens` is somebody's guess of it, 0: nobody's. `program`: the calls of one agent share a name.
    """

    job_id: int
    prompt_tokens: int
    max_output_tokens: int
    output_tokens: int = 0
    priority: int = 0
    service_class: str = ""
    oracle_output_tokens: int = 0
    expected_output_tokens: int = 0
    program: str = ""


@dataclass(frozen=True, slots=True)
class JobAborted:
    """The client went away, cancelled, ran out of time, or the gateway saw a stop string. Unknown ids are ignored."""

    job_id: int


@dataclass(frozen=True, slots=True)
class IterationDone:
    """The last stage answered plan `seq`. `stopped` names the jobs whose drawn token ends them (EOS, stop id)."""

    seq: int
    epoch: int
    compute_ns: int
    stopped: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StageUp:
    """A stage is connected and configured for the current epoch; its pool has `num_blocks` usable blocks."""

    stage: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class StageDown:
    """A stage is gone, or could not carry out a plan. KV of every job is lost: jobs are planned again."""

    stage: int


@dataclass(frozen=True, slots=True)
class ProfileUpdated:
    profile: Profile


@dataclass(frozen=True, slots=True)
class ConfigChanged:
    """An operator's wish, whole: from here on the core works by `config` (`reconfigure.py` says what may change)."""

    config: CoreConfig


@dataclass(frozen=True, slots=True)
class Woke:
    """The time asked for by the latest WakeAt has come."""


@dataclass(frozen=True, slots=True)
class HostSlotsGranted:
    """Host slots leased ahead: each holds one block of every stage alike. Grants add up until HostStoreDown."""

    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HostStoreDown:
    """The host arena is gone or was started anew: all host copies and all grants are void.

    Stages go on reporting the swaps in flight (with `ok` or not): a block of one is reused only when its copy has
    landed on every stage or the epoch has risen.
    """


@dataclass(frozen=True, slots=True)
class SwapDone:
    """The copy of swap `swap_id` has landed on `stage`. Not `ok`: what is at the destination must not be used.

    `num_bytes` and `copy_ns` are this stage's own.
    """

    swap_id: int
    stage: int
    epoch: int
    ok: bool
    num_bytes: int
    copy_ns: int


Event = (
    JobArrived
    | JobAborted
    | IterationDone
    | StageUp
    | StageDown
    | ProfileUpdated
    | ConfigChanged
    | Woke
    | HostSlotsGranted
    | HostStoreDown
    | SwapDone
)
