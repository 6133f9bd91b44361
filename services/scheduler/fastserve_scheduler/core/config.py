"""What an operator can choose about scheduling. Checked once, here; never changed afterwards."""

from dataclasses import dataclass, field
from typing import Literal, get_args

Promotion = Literal["reset", "return"]
DemoteWhen = Literal["used-reaches", "used-exceeds", "next-would-exceed"]
Overrun = Literal["finish", "abort"]
Charge = Literal["wall", "share"]
AfterPrefill = Literal["stay", "top"]
KvRanking = Literal["enst", "order"]

MAX_LEVELS = 64
"""Quanta double per level: 64 levels exceed any time an integer of nanoseconds needs to hold."""

MAX_RESERVE_PERCENT = 50
"""More than half of the pool kept free is a pool half the size."""


def _at_least(owner: str, name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{owner}.{name} must be at least {least}, not {value}")


def _one_of(owner: str, name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{owner}.{name} must be one of {', '.join(choices)}, not {value!r}")


@dataclass(frozen=True, slots=True)
class MlfqConfig:
    """The feedback queues.

    `ratio`: q_{i+1} / q_i. `num_levels` 0: as many as the longest prompt needs, and no fewer than ten.
    `eta`: levels a job drops when its quantum is used up. `alpha_ns`: a job that has not run for so long is starving.
    `promotion`: what a starving job gets, `reset` = Q1 with a fresh quantum, `return` = one token, then back to the
    front of its own queue. `demote_when`: execution time at the level reaches q_i, exceeds it, or would exceed it with
    the job's next iteration. `overrun` is for `naive-mlfq` alone: a first iteration longer than the quantum of its
    level is finished, or its work is thrown away.

    `charge`: an iteration costs each of its jobs all of its time, or its time over the number of jobs. `after_prefill`:
    with its first token a job stays in the queue it joined, or goes to Q1 with a fresh quantum, because what it has
    cost already cannot be had back. `alpha_rounds`: alpha is at least so many rounds over all jobs; 0: constant.
    """

    ratio: int = 2
    num_levels: int = 0
    eta: int = 1
    alpha_ns: int = 10_000_000_000
    promotion: Promotion = "reset"
    demote_when: DemoteWhen = "used-reaches"
    overrun: Overrun = "finish"
    charge: Charge = "wall"
    after_prefill: AfterPrefill = "stay"
    alpha_rounds: int = 0

    def __post_init__(self) -> None:
        owner = type(self).__name__
        _at_least(owner, "ratio", self.ratio, 2)
        _at_least(owner, "num_levels", self.num_levels, 0)
        if self.num_levels > MAX_LEVELS:
            raise ValueError(f"{owner}.num_levels must be at most {MAX_LEVELS}, not {self.num_levels}")
        _at_least(owner, "eta", self.eta, 1)
        _at_least(owner, "alpha_ns", self.alpha_ns, 1)
        _one_of(owner, "promotion", self.promotion, get_args(Promotion))
        _one_of(owner, "demote_when", self.demote_when, get_args(DemoteWhen))
        _one_of(owner, "overrun", self.overrun, get_args(Overrun))
        _one_of(owner, "charge", self.charge, get_args(Charge))
        _one_of(owner, "after_prefill", self.after_prefill, get_args(AfterPrefill))
        _at_least(owner, "alpha_rounds", self.alpha_rounds, 0)


PRESETS: dict[str, MlfqConfig] = {
    "default": MlfqConfig(),
    "paper": MlfqConfig(alpha_ns=300_000_000, promotion="reset"),
}
"""`paper` is the algorithm as published; why it is not the default is in docs/adr/0008."""


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """Limits and choices of one pipeline.

    `max_batch_tokens`: prompt and decode tokens of one iteration; a longer prompt runs alone when chunking is off.
    `prefill_chunk_tokens` 0: prompts run whole; otherwise the prompt tokens of an iteration in which a full batch of
    decodes runs (see `budget.py`). `max_waiting_jobs`, `max_waiting_tokens`: accepted jobs that are not running, and
    the prompt tokens of those; beyond them new jobs are refused. `service_classes`: (name, alpha_ns) of jobs that
    name their class; others have `mlfq.alpha_ns`.

    Swapping (`kv_policy` proactive or reactive): `kv_ranking` says who leaves and comes first, by the order or by ENST
    (an order without levels has no ENST and ranks by itself). `kv_block_bytes`: one block on one stage, to guess the
    link's speed until it is measured; 0: unknown, the first swaps go one by one. `swap_reserve_*_percent`: bounds of
    the free part of the pool that is kept for newcomers. `swap_min_batches`: jobs are displaced by others only while
    the pool holds so many running batches; 0: always.

    `slo_first_token_ns`, `slo_token_ns`: when the first token is due after arrival, and each further one after it
    (`slack`, `edf`). `slack_step_ns`: due times nearer to each other than this are equal. `probe_tokens`: output tokens
    before a job is ranked by its expected length (`predicted`).
    """

    num_stages: int
    block_size: int
    max_batch_size: int
    max_batch_tokens: int
    max_model_len: int
    prefill_chunk_tokens: int = 0
    max_waiting_jobs: int = 4096
    max_waiting_tokens: int = 4 << 20
    policy: str = "predicted"
    mlfq: MlfqConfig = field(default_factory=MlfqConfig)
    service_classes: tuple[tuple[str, int], ...] = ()
    kv_policy: str = "proactive"
    kv_ranking: KvRanking = "order"
    kv_block_bytes: int = 0
    swap_reserve_min_percent: int = 2
    swap_reserve_max_percent: int = 5
    swap_min_batches: int = 2
    slo_first_token_ns: int = 300_000_000
    slo_token_ns: int = 300_000_000
    slack_step_ns: int = 5_000_000_000
    probe_tokens: int = 16

    def __post_init__(self) -> None:
        # The tables import this module; asking them here keeps a wrong name an error at birth.
        from fastserve_scheduler.core.kv import KV_POLICIES
        from fastserve_scheduler.core.policies import POLICIES

        owner = type(self).__name__
        for name in ("num_stages", "block_size", "max_batch_size", "max_model_len", "max_waiting_jobs"):
            _at_least(owner, name, getattr(self, name), 1)
        _at_least(owner, "max_batch_tokens", self.max_batch_tokens, 1)
        _at_least(owner, "prefill_chunk_tokens", self.prefill_chunk_tokens, 0)
        if self.prefill_chunk_tokens > self.max_batch_tokens:
            raise ValueError(f"{owner}.prefill_chunk_tokens must not exceed max_batch_tokens ({self.max_batch_tokens})")
        if self.max_waiting_tokens < self.max_model_len:
            raise ValueError(
                f"{owner}.max_waiting_tokens ({self.max_waiting_tokens}) must hold one prompt of max_model_len"
                f" ({self.max_model_len}), or the longest could never wait"
            )
        _one_of(owner, "policy", self.policy, tuple(POLICIES))
        _one_of(owner, "kv_policy", self.kv_policy, tuple(KV_POLICIES))
        _one_of(owner, "kv_ranking", self.kv_ranking, get_args(KvRanking))
        for name in ("slo_first_token_ns", "slo_token_ns", "slack_step_ns", "probe_tokens"):
            _at_least(owner, name, getattr(self, name), 1)
        self._check_swapping()
        self._check_classes()

    def _check_swapping(self) -> None:
        owner = type(self).__name__
        _at_least(owner, "kv_block_bytes", self.kv_block_bytes, 0)
        _at_least(owner, "swap_reserve_min_percent", self.swap_reserve_min_percent, 0)
        _at_least(owner, "swap_reserve_max_percent", self.swap_reserve_max_percent, self.swap_reserve_min_percent)
        if self.swap_reserve_max_percent > MAX_RESERVE_PERCENT:
            raise ValueError(f"{owner}.swap_reserve_max_percent must be at most {MAX_RESERVE_PERCENT}")
        _at_least(owner, "swap_min_batches", self.swap_min_batches, 0)

    def _check_classes(self) -> None:
        names = [name for name, _ in self.service_classes]
        if "" in names or len(names) != len(dict.fromkeys(names)):
            raise ValueError("CoreConfig.service_classes must have distinct names that are not empty")
        for name, alpha_ns in self.service_classes:
            _at_least(f"CoreConfig.service_classes[{name!r}]", "alpha_ns", alpha_ns, 1)
