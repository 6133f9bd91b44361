"""What a KV policy decides: how much a job must own before it runs, and who gives way when blocks are short.

It decides, the batch former does. A policy that moves KV to host memory adds orders of its own to the plan; a block on
its way out stays owned until the move is reported done, which is why only `BlockPool.release` makes a block free.
"""

from abc import ABC, abstractmethod

from fastserve_scheduler.core.blocks import BlockPool
from fastserve_scheduler.core.job import Job
from fastserve_scheduler.core.ranked import RankedJobs


class KvPolicy(ABC):
    #: Some job may lose its blocks to another.
    evicts: bool

    @abstractmethod
    def tokens_to_hold(self, job: Job, num_tokens: int) -> int:
        """How many tokens the job's blocks must hold before its next `num_tokens` tokens are computed."""

    @abstractmethod
    def victims(self, requester: Job, num_blocks: int, idle: RankedJobs, pool: BlockPool) -> list[Job] | None:
        """Who must give way so that `num_blocks` are free; None when that cannot be had. Changes nothing.

        `idle`: the resident jobs that are neither in flight nor in the batch being formed.
        """


def gives_way(victim: Job, requester: Job) -> bool:
    """A victim ranks strictly behind the requester, and not only by the tie-breaker when the requester has no KV.

    So of two jobs of one level the one whose work is already done keeps it.
    """
    if requester.resident:
        return victim.rank > requester.rank
    return victim.rank[:-1] > requester.rank[:-1]
