"""Length pairs that are distributed as public data sets' are, from a small table of quantiles.

A length is drawn by inverse transform: between the table's quantiles the logarithm is interpolated. Input and output
are tied by a Gaussian copula with the data's rank correlation r: its parameter is 2 sin(pi r / 6).

Sources. ShareGPT: 79,725 pairs of OPT-token lengths (first round, input + output < 2048) published with the artifact of
the vLLM paper (SOSP '23, github.com/sosp-ae-39/sosp-ae-astra); means 161.18 and 338.00, as in the paper's Fig. 11.
Alpaca: 1,803 records of tatsu-lab/stanford_alpaca (CC BY-NC 4.0), character lengths scaled to the vLLM paper's mean
token counts, 19.31 and 58.45. Order statistics only; no text.
"""

import bisect
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

#: The cumulative probabilities of the tables below.
QUANTILES = (0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 1)

_NORMAL = NormalDist()
#: An output that lifts the pair above the data set's own total is drawn again, this often at most; then it is cut.
_MAX_REDRAWS = 100


@dataclass(frozen=True, slots=True)
class LengthModel:
    """`inputs`, `outputs`: tokens at QUANTILES; the means are the published ones. `max_total_tokens`: the filter of the
    data set, or none."""

    inputs: Sequence[int]
    outputs: Sequence[int]
    mean_input: float
    mean_output: float
    rank_correlation: float
    max_total_tokens: int | None = None

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """One (input, output) pair, each at least 1."""
        weight = 2 * math.sin(math.pi * self.rank_correlation / 6)
        first = rng.gauss()
        num_input = quantile(self.inputs, _NORMAL.cdf(first))
        num_output = 1
        for _ in range(_MAX_REDRAWS):
            second = weight * first + math.sqrt(1 - weight * weight) * rng.gauss()
            num_output = quantile(self.outputs, _NORMAL.cdf(second))
            if self.max_total_tokens is None or num_input + num_output <= self.max_total_tokens:
                return num_input, num_output
        assert self.max_total_tokens is not None
        return num_input, max(self.max_total_tokens - num_input, 1)


def quantile(table: Sequence[int], probability: float) -> int:
    """The length below which a share `probability` of the data lies."""
    index = min(max(bisect.bisect_right(QUANTILES, probability) - 1, 0), len(QUANTILES) - 2)
    low, high = QUANTILES[index], QUANTILES[index + 1]
    share = min(max((probability - low) / (high - low), 0.0), 1.0)
    return max(round(math.exp(math.log(table[index]) * (1 - share) + math.log(table[index + 1]) * share)), 1)


SHAREGPT = LengthModel(
    inputs=(1, 2, 7, 9, 13, 18, 24, 35, 55, 94, 203, 506, 863, 1229, 1460, 1636, 1864, 2028),
    outputs=(1, 4, 22, 45, 101, 157, 216, 271, 330, 405, 525, 754, 899, 1139, 1280, 1443, 1707, 2009),
    mean_input=161.18,
    mean_output=338.00,
    rank_correlation=0.2142,
    max_total_tokens=2047,
)

SHAREGPT_ARTIFACT = LengthModel(
    inputs=(1, 2, 6, 9, 13, 17, 23, 33, 50, 82, 158, 377, 593, 815, 917, 974, 1015, 1024),
    outputs=(1, 6, 23, 46, 102, 159, 218, 273, 332, 406, 527, 760, 910, 1147, 1287, 1449, 1709, 2009),
    mean_input=117.52,
    mean_output=340.19,
    rank_correlation=0.2426,
    max_total_tokens=2048,
)
"""ShareGPT as filtered by FastServe's artifact (github.com/LLMServe/FastServe, benchmark-serving.py): input up to 1024,
total up to 2048, not both below 4. 76,819 of the pairs."""

ALPACA = LengthModel(
    inputs=(4, 6, 8, 9, 11, 12, 14, 16, 17, 20, 23, 32, 44, 65, 90, 109, 132, 160),
    outputs=(1, 1, 2, 4, 9, 13, 19, 34, 58, 83, 107, 137, 171, 215, 271, 326, 514, 530),
    mean_input=19.31,
    mean_output=58.45,
    rank_correlation=-0.1827,
)

MODELS = {"sharegpt-like": SHAREGPT, "sharegpt-artifact-like": SHAREGPT_ARTIFACT, "alpaca-like": ALPACA}
