"""How much one iteration may take. Says yes or no; blocks are the KV policy's answer, not this one's.

The chunk rule (the only one): a prompt is cut so that an iteration stalls its decodes no longer in sum than a full
batch of them is stalled by `prefill_chunk_tokens`. So with D decodes ready the prompt tokens of the iteration are
`prefill_chunk_tokens * max_batch_size / D`, and everything `max_batch_tokens` leaves when there are none. Decodes never
draw on them: a prompt that shared their budget would empty the batch. On a pipeline that has more than one job to run
the chunk does not grow: other batches are in flight beside it, and while the first stage computes a long one the stages
behind it run dry.
"""

from dataclasses import dataclass

from fastserve_scheduler.core.config import CoreConfig
from fastserve_scheduler.core.job import Job


@dataclass(slots=True)
class BatchBudget:
    jobs_left: int
    tokens_left: int
    #: Prompt tokens still to be had; None: prompts are not cut.
    prompt_left: int | None
    #: Nothing was taken yet.
    empty: bool = True

    @classmethod
    def of(cls, config: CoreConfig, max_jobs: int, num_decodes: int, *, shared: bool) -> "BatchBudget":
        """`shared`: the stages have other jobs to run beside this batch's."""
        chunk = config.prefill_chunk_tokens
        if chunk == 0:
            return cls(max_jobs, config.max_batch_tokens, None)
        if shared:
            return cls(max_jobs, config.max_batch_tokens, chunk)
        decodes = min(num_decodes, config.max_batch_size)
        grown = chunk * config.max_batch_size // max(decodes, 1)
        return cls(max_jobs, config.max_batch_tokens, max(chunk, min(grown, config.max_batch_tokens - decodes)))

    def grant(self, job: Job) -> int:
        """How many tokens the job may compute in this iteration; 0: it does not fit. Changes nothing."""
        if self.jobs_left == 0 or self.tokens_left <= 0:
            return 0
        if job.is_decode:
            return 1
        pending = job.pending_tokens
        if self.prompt_left is not None:
            return min(pending, self.prompt_left, self.tokens_left)
        return pending if pending <= self.tokens_left or self.empty else 0

    def take(self, job: Job, num_tokens: int) -> None:
        self.empty = False
        self.jobs_left -= 1
        self.tokens_left -= num_tokens
        if self.prompt_left is not None and not job.is_decode:
            self.prompt_left -= num_tokens
