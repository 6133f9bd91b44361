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
        decodes = [pick.job for pick in picks if pick.job.is_decode]
        return cls(
            plan=RunIteration(seq, epoch, tuple(_item(pick.job, pick.num_tokens) for pick in picks), swaps),
            jobs=tuple(pick.job for pick in picks),
            prompt_tokens=sum(pick.num_tokens for pick in picks) - len(decodes),
            num_decodes=len(decodes),
            decode_context_tokens=sum(job.computed for job in decodes),
            config=config,
        )


def _item(job: Job, num_tokens: int) -> PlanItem:
    return PlanItem(
        job_id=job.job_id,
        start=job.computed,
        num_tokens=num_tokens,
        sample=num_tokens == job.pending_tokens and not job.discarding,
        output_position=job.generated,
        block_table=job.table.block_ids,
    )
