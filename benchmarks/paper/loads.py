"""What is asked for: lengths by name, Poisson arrivals, the same requests under every policy."""

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice

from fastserve_common.load.lengths import ALPACA, SHAREGPT_ARTIFACT
from fastserve_scheduler.sim.arrivals import DrawLengths, Request, at_once, constant, cut, independent, lengths_of
from fastserve_scheduler.sim.workload import Lognormal

LONGEST_PROMPT = 1024
MAX_TOTAL = 2048
RATIO_TOTAL = 1024
"""Input and output together in the sweep of their ratio, on average."""

VARIATION = 1.0
"""Of both lengths in that sweep (ShareGPT's outputs have 0.84, its inputs 1.6)."""


def by_ratio(ratio: float) -> DrawLengths:
    """Lognormal lengths whose means have this ratio of input to output."""
    output = max(RATIO_TOTAL / (1 + ratio), 2.0)
    outputs = Lognormal(output, VARIATION, MAX_TOTAL // 2)
    inputs = Lognormal(RATIO_TOTAL - output, VARIATION, MAX_TOTAL - 1)
    return lambda rng: cut(inputs.draw(rng), outputs.draw(rng), None, MAX_TOTAL)


def short_answers(rng: random.Random) -> tuple[int, int]:
    """At most 20 tokens of output, as in the paper's figure 8; inputs it does not tell."""
    return rng.randint(1, 1024), rng.randint(1, 20)


def fixed(rng: random.Random) -> tuple[int, int]:
    """ShareGPT's means."""
    return 118, 340


LENGTHS: dict[str, DrawLengths] = {
    "sharegpt": lengths_of(SHAREGPT_ARTIFACT, LONGEST_PROMPT, MAX_TOTAL),
    "alpaca": lengths_of(ALPACA, LONGEST_PROMPT, MAX_TOTAL),
    "fixed": fixed,
    "short-answers": short_answers,
}


def lengths(load: str) -> DrawLengths:
    """By name; `ratio:4` has four times as much input as output."""
    kind, _, value = load.partition(":")
    return by_ratio(float(value)) if kind == "ratio" else LENGTHS[load]


def without_limits(arrivals: Iterable[Request], model_len: int) -> Iterator[Request]:
    """Callers that ask for all there is room for, where the others name the true length as their limit."""
    return (replace(request, max_output_tokens=model_len - request.prompt_tokens) for request in arrivals)


def requests(load: str, rate: float, num_jobs: int, seed: int) -> Iterator[Request]:
    """`rate` 0: all at once."""
    draw = lengths(load)
    return islice(independent(constant(rate), draw, seed), num_jobs) if rate else at_once(num_jobs, draw, seed)
