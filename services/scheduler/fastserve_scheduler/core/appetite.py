"""How much KV memory the load wants: what newcomers take, and what a running batch holds. Moving means, in blocks."""

from fastserve_scheduler.core.config import CoreConfig
from fastserve_scheduler.core.link import moved

SCALE = 1024
"""Means are kept in 1/1024 blocks, so that they stay integers and do not round to nothing."""

HORIZON_ITERATIONS = 4
"""Blocks for the newcomers of so many iterations are kept free: about as long as making room takes."""


class Appetite:
    def __init__(self, config: CoreConfig) -> None:
        self._config = config
        self._arrived = 0
        self._per_iteration = 0
        self._running = 0

    def reconfigure(self, config: CoreConfig) -> None:
        self._config = config

    def arrived(self, num_blocks: int) -> None:
        """A newcomer's prompt needs so many."""
        self._arrived += num_blocks

    def launched(self, running_blocks: int) -> None:
        """An iteration begins; the jobs in flight hold `running_blocks`."""
        self._per_iteration = moved(self._per_iteration, self._arrived * SCALE)
        self._arrived = 0
        self._running = moved(self._running, running_blocks * SCALE)

    def reserve(self, pool_blocks: int) -> int:
        """Blocks to keep free for newcomers, within the bounds that the configuration sets."""
        wanted = HORIZON_ITERATIONS * self._per_iteration // SCALE
        least = pool_blocks * self._config.swap_reserve_min_percent // 100
        most = pool_blocks * self._config.swap_reserve_max_percent // 100
        return min(max(wanted, least), most)

    def roomy(self, pool_blocks: int) -> bool:
        """The pool holds several running batches: only then is there somebody to move who does not run anyway."""
        return self._config.swap_min_batches * self._running <= pool_blocks * SCALE
