"""Which replica a request goes to."""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from fastserve_scheduler.sim.replica import Replica


class Router(ABC):
    @abstractmethod
    def choose(self, replicas: Sequence[Replica]) -> int:
        """Index of the replica that takes the next request."""


class RoundRobin(Router):
    def __init__(self) -> None:
        self._next = 0

    def choose(self, replicas: Sequence[Replica]) -> int:
        chosen, self._next = self._next % len(replicas), self._next + 1
        return chosen


class LeastLoaded(Router):
    """Join the shortest queue: fewest waiting prompt tokens, then fewest requests, then the first."""

    def choose(self, replicas: Sequence[Replica]) -> int:
        return min(range(len(replicas)), key=lambda index: (*_load(replicas[index]), index))


class TwoChoices(Router):
    """The less loaded of two drawn at random (Mitzenmacher, "The Power of Two Choices", 2001)."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"{seed}:router")

    def choose(self, replicas: Sequence[Replica]) -> int:
        if len(replicas) == 1:
            return 0
        pair = self._rng.sample(range(len(replicas)), 2)
        return min(pair, key=lambda index: (*_load(replicas[index]), index))


def _load(replica: Replica) -> tuple[int, int]:
    return replica.core.waiting_prompt_tokens, len(replica.core.jobs)


ROUTERS: dict[str, Callable[[int], Router]] = {
    "round-robin": lambda seed: RoundRobin(),
    "least-loaded": lambda seed: LeastLoaded(),
    "two-choices": TwoChoices,
}
"""By name; each is made with a seed."""
