"""What the core shows to metrics and `top`. Cheap enough to take at every scrape: nothing here walks the jobs."""

from dataclasses import dataclass, field

from fastserve_scheduler.core.batch import Shortage


@dataclass(slots=True)
class Counters:
    """Totals since the core was made."""

    iterations: int = 0
    accepted: int = 0
    rejected: int = 0
    finished: int = 0
    promotions: int = 0
    tickets: int = 0
    generated_tokens: int = 0
    #: Tokens computed a second time because their KV was given up or lost.
    recomputed_tokens: int = 0
    #: Jobs that were running and had to stop, by what they were short of. BLOCKS: KV evicted.
    preemptions: dict[Shortage, int] = field(default_factory=lambda: dict.fromkeys(Shortage, 0))


@dataclass(frozen=True, slots=True)
class LevelCount:
    waiting: int
    running: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    ready: bool
    epoch: int
    levels: tuple[LevelCount, ...]
    quantum_ns: tuple[int, ...]
    jobs: int
    running: int
    waiting: int
    waiting_prompt_tokens: int
    resident: int
    batches_in_flight: int
    blocks_free: int
    blocks_total: int
    iterations: int
    accepted: int
    rejected: int
    finished: int
    preemptions_slots: int
    preemptions_tokens: int
    preemptions_blocks: int
    promotions: int
    tickets: int
    demotions: tuple[int, ...]
    generated_tokens: int
    recomputed_tokens: int
    #: Time since the job that waits longest last ran.
    longest_wait_ns: int
    #: Observed over predicted time of first iterations.
    prefill_correction: float
