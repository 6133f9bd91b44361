"""How much work is thrown away for want of memory: tokens whose KV neither tier had room for, per token made.

A moving mean over the runs of jobs, each of which makes a token, in 1/1024 tokens.
"""

from dataclasses import dataclass

SCALE = 1024

WEIGHT = 1024
"""One run of a job moves the mean by 1/1024 of the way: 64 iterations with 16 jobs a batch."""

LIMIT = 2
"""Tokens lost for each one made. Up to here newcomers that are served at once are worth it: see docs/swapping.md."""


@dataclass(slots=True)
class Waste:
    _mean: int = 0
    _lost: int = 0

    def lost(self, num_tokens: int) -> None:
        """The KV of so many tokens is gone and will be computed again."""
        self._lost += num_tokens

    def ran(self) -> None:
        """A job is in a batch."""
        if self._lost or self._mean:
            self._mean += (self._lost * SCALE - self._mean) // WEIGHT
            self._lost = 0

    @property
    def high(self) -> bool:
        return self._mean > LIMIT * SCALE
