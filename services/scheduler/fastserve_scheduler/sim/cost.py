"""How long a plan takes on each stage: the only thing the simulator has in place of workers."""

from dataclasses import dataclass
from typing import Protocol

from fastserve_scheduler.core.commands import PlanItem, RunIteration
from fastserve_scheduler.core.profile import Profile


class CostModel(Protocol):
    def stage_ns(self, plan: RunIteration, stage: int) -> int:
        """Time `stage` computes `plan`, in ns, at least 1."""


@dataclass(frozen=True, slots=True)
class LinkCost:
    """The link between one stage and its host: both directions at once, each at `bytes_per_second`.

    `block_bytes`: one block on one stage. `latency_ns` is paid once per swap.
    """

    block_bytes: int = 1
    bytes_per_second: int = 25_000_000_000
    latency_ns: int = 0

    def copy_ns(self, num_blocks: int) -> int:
        return self.latency_ns + num_blocks * self.block_bytes * 1_000_000_000 // self.bytes_per_second


@dataclass(frozen=True, slots=True)
class LinearCost:
    """Iteration time of one model on `num_stages` equal stages, as a sum of fitted parts.

    A mixed iteration pays the larger fixed cost of the two kinds once. Chunks pay for attention to what came before
    them: the quadratic part of positions start .. start+n is ((start+n)^2 - start^2).
    """

    prefill_fixed_ns: int
    prefill_token_ns: int
    prefill_token_squared_ns: float
    decode_fixed_ns: int
    decode_job_ns: int
    decode_context_ns: float
    num_stages: int = 1

    def stage_ns(self, plan: RunIteration, stage: int) -> int:
        return max(1, self.iteration_ns(plan) // self.num_stages)

    def iteration_ns(self, plan: RunIteration) -> int:
        fixed_ns, variable_ns = 0, 0.0
        for item in plan.items:
            if _is_decode(item):
                fixed_ns = max(fixed_ns, self.decode_fixed_ns)
                variable_ns += self.decode_job_ns + self.decode_context_ns * item.start
            else:
                fixed_ns = max(fixed_ns, self.prefill_fixed_ns)
                end = item.start + item.num_tokens
                variable_ns += self.prefill_token_ns * item.num_tokens
                variable_ns += self.prefill_token_squared_ns * (end * end - item.start * item.start)
        return fixed_ns + round(variable_ns)

    def profile(self, max_model_len: int, max_batch_size: int) -> Profile:
        """What a profiler would measure of this model."""
        lengths = sorted({1, *(max_model_len * eighth // 8 or 1 for eighth in range(1, 9))})
        batches = sorted({1, max_batch_size})
        contexts = sorted({1, max_model_len})
        return Profile(
            prefill=tuple((tokens, self._alone_ns(tokens)) for tokens in lengths),
            decode=tuple(
                (batch, context, self._decode_ns(batch, context)) for batch in batches for context in contexts
            ),
        )

    def _alone_ns(self, tokens: int) -> int:
        squared_ns = self.prefill_token_squared_ns * tokens * tokens
        return self.prefill_fixed_ns + self.prefill_token_ns * tokens + round(squared_ns)

    def _decode_ns(self, batch: int, context: int) -> int:
        return self.decode_fixed_ns + batch * (self.decode_job_ns + round(self.decode_context_ns * context))


def prefill_plan(tokens: int) -> RunIteration:
    """One whole prompt."""
    return RunIteration(0, 0, (PlanItem(0, 0, tokens, True, 0, ()),))


def decode_plan(batch: int, context: int) -> RunIteration:
    """`batch` jobs, each with `context` tokens of KV."""
    return RunIteration(0, 0, tuple(PlanItem(job, context, 1, True, 1, ()) for job in range(batch)))


def iteration_ns(cost: CostModel, plan: RunIteration, num_stages: int) -> int:
    """All stages, one after the other."""
    return sum(cost.stage_ns(plan, stage) for stage in range(num_stages))


def profile_of(cost: CostModel, num_stages: int, max_model_len: int, max_batch_size: int) -> Profile:
    """What a profiler would measure of a system with these times: doubling lengths and batches, some contexts."""
    lengths, batches = _doubling(16, max_model_len), _doubling(1, max_batch_size)
    contexts = sorted({1, *(min(context, max_model_len) for context in (256, 1024, max_model_len))})
    return Profile(
        prefill=tuple((n, iteration_ns(cost, prefill_plan(n), num_stages)) for n in lengths),
        decode=tuple((b, c, iteration_ns(cost, decode_plan(b, c), num_stages)) for b in batches for c in contexts),
    )


def _doubling(first: int, last: int) -> list[int]:
    values = [min(first, last)]
    while values[-1] < last:
        values.append(min(values[-1] * 2, last))
    return values


def _is_decode(item: PlanItem) -> bool:
    return item.num_tokens == 1 and item.start > 0


OPT_13B_A100 = LinearCost(
    prefill_fixed_ns=18_100_000,
    prefill_token_ns=102_000,
    prefill_token_squared_ns=7.1,
    decode_fixed_ns=19_900_000,
    decode_job_ns=38_500,
    decode_context_ns=627.0,
)
"""OPT-13B in fp16 on one A100 80 GB: DistServe's fitted iteration times."""

OPT_2_7B_PAPER = LinearCost(
    prefill_fixed_ns=2_000_000,
    prefill_token_ns=59_150,
    prefill_token_squared_ns=26.16,
    decode_fixed_ns=2_000_000,
    decode_job_ns=0,
    decode_context_ns=0.0,
)
"""OPT-2.7B as the FastServe paper reports it: 10 ms for a prompt of 128 tokens, 90 ms for 1,024, 2 ms a decode.

No roofline reaches the last (`calibration.py`).
"""
