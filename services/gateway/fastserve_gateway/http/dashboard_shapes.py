"""What `/dashboard/state` answers."""

from pydantic import BaseModel


class LevelCounts(BaseModel):
    level: int
    #: 0: the policy has no quanta.
    quantum_ms: float
    waiting: int
    running: int


class BlockCounts(BaseModel):
    total: int
    free: int


class SwapCounts(BaseModel):
    """Copies of KV since the scheduler began: `out` to the host, `into` the device."""

    in_flight: int
    out: int
    out_bytes: int
    into: int
    into_bytes: int


class StageCondition(BaseModel):
    stage: int
    up: bool
    address: str
    last_iteration_ms: float


class PipelineState(BaseModel):
    """The scheduler's account of now; totals are since it began."""

    policy: str
    levels: list[LevelCounts]
    running: int
    waiting: int
    #: Of the waiting ones: their KV is on the host alone.
    swapped: int
    batches_in_flight: int
    longest_wait_ms: int
    device_blocks: BlockCounts
    host_blocks: BlockCounts
    swaps: SwapCounts
    stages: list[StageCondition]
    iterations: int
    tokens_generated: int
    preemptions: int
    promotions: int
    demotions: int


class SchedulerLinkState(BaseModel):
    connected: bool
    ready: bool
    #: What is missing, in words, when not ready.
    detail: str
    #: Rises with every start of the scheduler.
    generation: int
    max_model_len: int | None


class GatewayCounts(BaseModel):
    """Answers of this gateway; totals are since it began."""

    running: int
    waiting: int
    accepted: int
    outcomes: dict[str, int]
    prompt_tokens: int
    generation_tokens: int


class LatencyBuckets(BaseModel):
    """`counts[i]` of all measurements so far were at most `bounds[i]` seconds; the last count is all of them."""

    bounds: list[float]
    counts: list[int]


class DashboardState(BaseModel):
    #: Unix seconds, when it was taken.
    time: float
    model: str
    scheduler: SchedulerLinkState
    gateway: GatewayCounts
    #: By name: `time_to_first_token`, `inter_token`, `end_to_end`.
    latency: dict[str, LatencyBuckets]
    #: null: the scheduler is away, or does not answer.
    pipeline: PipelineState | None
