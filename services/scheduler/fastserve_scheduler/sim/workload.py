"""Seeded arrivals for experiments and tests. Randomness lives here and nowhere in the core."""

import math
import random
from dataclasses import dataclass

from fastserve_scheduler.core.events import Event, JobArrived


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Lengths with a given mean and coefficient of variation, cut to 1 .. `longest`."""

    mean_tokens: float
    variation: float
    longest: int

    def draw(self, random_: random.Random) -> int:
        sigma_squared = math.log(1 + self.variation * self.variation)
        mu = math.log(self.mean_tokens) - sigma_squared / 2
        return min(max(1, round(random_.lognormvariate(mu, math.sqrt(sigma_squared)))), self.longest)


SHAREGPT_INPUT = Lognormal(120, 1.2, 1024)
"""Like ShareGPT as filtered by the paper's artifact: after the cut 118 tokens in and 340 out on average."""
SHAREGPT_OUTPUT = Lognormal(366, 1.0, 1024)


def poisson(
    num_jobs: int,
    jobs_per_second: float,
    seed: int,
    prompt: Lognormal = SHAREGPT_INPUT,
    output: Lognormal = SHAREGPT_OUTPUT,
) -> list[tuple[int, Event]]:
    """Independent arrivals with lengths drawn one by one; the oracle knows the output lengths."""
    random_ = random.Random(seed)
    arrivals: list[tuple[int, Event]] = []
    at_ns = 0
    for job_id in range(1, num_jobs + 1):
        at_ns += round(random_.expovariate(jobs_per_second) * 1e9)
        tokens = output.draw(random_)
        arrivals.append((at_ns, JobArrived(job_id, prompt.draw(random_), tokens, oracle_output_tokens=tokens)))
    return arrivals
