"""Iteration times as a profiler measured them."""

from dataclasses import dataclass, field

from fastserve_scheduler.core.commands import RunIteration
from fastserve_scheduler.core.profile import Profile

CONTEXT_STEP = 16
"""Contexts are rounded up to multiples of this, so that the table of times already looked up stays small."""


@dataclass(slots=True)
class ProfileCost:
    """Times of a measured profile, exact at its points, for mixed iterations too.

    With P(n) the curve of prefills, P(0) its start, and D(b, c) the decodes, of which the shortest is d:

        iteration = max(P(0), d) + sum over prompt items (P(start + n) - P(start)) + D(decodes, mean context) - d

    where a part that does not occur adds nothing. `stage_shares`: how the stages divide it; they add up to 1.
    """

    source: Profile
    stage_shares: tuple[float, ...] = (1.0,)
    _start_ns: int = field(init=False)
    _decodes: dict[tuple[int, int], int] = field(init=False, repr=False, default_factory=dict)
    _plan: RunIteration | None = field(init=False, repr=False, default=None)
    _plan_ns: int = field(init=False, repr=False, default=0)

    def __post_init__(self) -> None:
        if abs(sum(self.stage_shares) - 1) > 1e-6 or min(self.stage_shares) <= 0:
            raise ValueError(f"the shares of the stages must be above 0 and add up to 1 (got {self.stage_shares})")
        shortest, second = self.source.prefill_ns(1), self.source.prefill_ns(2)
        self._start_ns = max(1, 2 * shortest - second)

    def stage_ns(self, plan: RunIteration, stage: int) -> int:
        if plan is not self._plan:
            self._plan, self._plan_ns = plan, self._iteration_ns(plan)
        return max(1, round(self._plan_ns * self.stage_shares[stage]))

    def profile(self, max_model_len: int, max_batch_size: int) -> Profile:
        return self.source

    def _iteration_ns(self, plan: RunIteration) -> int:
        decodes = context = prompt_ns = 0
        for item in plan.items:
            if item.num_tokens == 1 and item.start > 0:
                decodes += 1
                context += item.start
            else:
                prompt_ns += self._prefix_ns(item.start + item.num_tokens) - self._prefix_ns(item.start)
        shortest_ns = self.source.min_decode_ns
        if not decodes:
            return self._start_ns + prompt_ns
        decode_ns = self._decode_ns(decodes, context // decodes)
        if decodes == len(plan.items):
            return decode_ns
        return max(self._start_ns, shortest_ns) + prompt_ns + decode_ns - shortest_ns

    def _prefix_ns(self, tokens: int) -> int:
        return self._start_ns if tokens == 0 else max(self._start_ns, self.source.prefill_ns(tokens))

    def _decode_ns(self, batch: int, context: int) -> int:
        rounded = -(-context // CONTEXT_STEP) * CONTEXT_STEP
        known = self._decodes.get((batch, rounded))
        if known is None:
            known = self._decodes[batch, rounded] = self.source.decode_ns(batch, rounded)
        return known
