"""What a KV policy decides: how much a job must own before it runs, and who gives way when blocks are short.

It decides; the batch former and the tiers do. A victim is swapped out where the host has room for it and loses its
KV where not; a block on its way out stays owned until every stage has reported the copy, which is why only
`BlockPool.release` and `keep` make a block free.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from fastserve_scheduler.core.appetite import Appetite
from fastserve_scheduler.core.config import CoreConfig
from fastserve_scheduler.core.job import Job
from fastserve_scheduler.core.line import Line
from fastserve_scheduler.core.ranking import Ranking
from fastserve_scheduler.core.tiers import Tiers


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a policy looks at."""

    config: CoreConfig
    line: Line
    tiers: Tiers
    ranking: Ranking
    appetite: Appetite


class KvPolicy(ABC):
    #: Some job may lose its blocks to another.
    evicts: bool
    #: A victim is swapped out while the host has room for it; otherwise its KV is computed again.
    swaps: bool = False
    #: A batch is launched only when everybody who belongs in it is on the device.
    batch_waits: bool = False

    def __init__(self, around: Surroundings) -> None:
        self._line, self._tiers, self._ranking = around.line, around.tiers, around.ranking
        self._appetite, self._config = around.appetite, around.config

    @abstractmethod
    def tokens_to_hold(self, job: Job, num_tokens: int) -> int:
        """How many tokens the job's blocks must hold before its next `num_tokens` tokens are computed."""

    @abstractmethod
    def victims(self, requester: Job, shortfall: int) -> list[Job] | None:
        """Idle jobs that must give way so that `shortfall` more blocks become free; None when that cannot be had.

        Changes nothing. A victim is neither in flight nor in the batch being formed: those are out of line.
        """

    @property
    def saving(self) -> bool:
        """So much KV is thrown away that whoever has none on the device waits for room, even if it starves."""
        return False

    def holds_back(self, num_blocks: int) -> bool:
        """Whether a job without KV that needs so many blocks is not to begin, though it might find them."""
        return False

    def look_ahead(self, claimed: int, running: int) -> None:  # noqa: B027 - only proactive swapping looks ahead
        """Move jobs that no batch needs now. `claimed`: blocks that jobs in the order wait for already; `running`:
        jobs in flight and in the batch just formed."""


def gives_way(victim: Job, requester: Job) -> bool:
    """A victim ranks strictly behind the requester, and not only by the tie-breaker when the requester has no KV here.

    So of two jobs of one level the one whose KV is on the device keeps it.
    """
    if requester.resident:
        return victim.rank > requester.rank
    return victim.rank[:-1] > requester.rank[:-1]
