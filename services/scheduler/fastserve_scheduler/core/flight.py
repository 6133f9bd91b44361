"""A batch as a plan on its way through the stages."""

from dataclasses import dataclass

from fastserve_scheduler.core.batch import Pick
from fastserve_scheduler.core.commands import PlanItem, RunIteration, SwapOp
from fastserve_scheduler.core.config import CoreConfig
from fastserve_scheduler.core.job import Job


@dataclass(frozen=True, slots=True)
class Flight:
    plan: RunIteration
    #: In the order of the plan's items.
    jobs: tuple[Job, ...]
    #: What the iteration is made of, to learn from its time.
    prompt_tokens: int
    num_decodes: int
    decode_context_tokens: int
    #: What it was formed by; the core's own may have changed since.
    config: CoreConfig

    @classmethod
    def of(cls, picks: list[Pick], swaps: tuple[SwapOp, ...], seq: int, epoch: int, config: CoreConfig) -> "Flight":
        items, num_tokens, num_decodes, context_tokens = [], 0, 0, 0
        for pick in picks:
            job, count = pick.job, pick.num_tokens
            num_tokens += count
            if job.is_decode:
                num_decodes += 1
                context_tokens += job.computed
            sample = count == job.pending_tokens and not job.discarding
            items.append(PlanItem(job.job_id, job.computed, count, sample, job.generated, job.table.block_ids))
        return cls(
            plan=RunIteration(seq, epoch, tuple(items), swaps),
            jobs=tuple(pick.job for pick in picks),
            prompt_tokens=num_tokens - num_decodes,
            num_decodes=num_decodes,
            decode_context_tokens=context_tokens,
            config=config,
        )
