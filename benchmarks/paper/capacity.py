"""Capacity of OPT-13B from its fitted iteration times, averaged over many drawn lengths: no simulation, no luck."""

import random
from functools import cache

from fastserve_scheduler.sim.cost import OPT_13B_A100

from .loads import lengths

DRAWN = 16_384
COST = OPT_13B_A100


def full_batches(load: str, batch: int) -> float:
    """Jobs per second when a batch is always full: a job takes its share of the fixed time of as many iterations as it
    has tokens of output, and the time of its own prompt and context."""
    spent_ns = [output / batch * COST.decode_fixed_ns + own_ns(prompt, output) for prompt, output in drawn(load)]
    return DRAWN / sum(spent_ns) * 1e9


def batch_by_batch(load: str, batch: int) -> float:
    """The same when nobody joins before everybody is done: the longest answer of a batch sets its iterations."""
    pairs = drawn(load)
    spent_ns = 0.0
    for first in range(0, DRAWN, batch):
        together = pairs[first : first + batch]
        longest = max(output for _, output in together)
        spent_ns += longest * COST.decode_fixed_ns + sum(own_ns(prompt, output) for prompt, output in together)
    return DRAWN / spent_ns * 1e9


@cache
def drawn(load: str) -> list[tuple[int, int]]:
    """The same for everybody."""
    rng, draw = random.Random(0), lengths(load)
    return [draw(rng) for _ in range(DRAWN)]


def own_ns(prompt: int, output: int) -> float:
    """Of one job, without the fixed time of iterations."""
    context = output * prompt + output * output / 2
    first_ns = COST.prefill_token_ns * prompt + COST.prefill_token_squared_ns * prompt * prompt
    return first_ns + output * COST.decode_job_ns + context * COST.decode_context_ns
