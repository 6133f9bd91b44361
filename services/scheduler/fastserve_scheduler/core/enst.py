"""The Estimated Next Scheduled Time of the paper (section 4.3), without looking at pairs of jobs.

    ENST(job)  = min(T_promote(job), T_execute(level of job))
    T_promote  = alpha - time since it last ran
    T_execute(level i) = (1/B) * sum over jobs j above level i of the quanta q_k that j uses up until it is at level i

Counted per level instead of per job: a job of level l passes k when l <= k and eta divides k - l, so

    T_execute(i) = (1/B) * sum over k < i of q_k * s_k,   s_k = n_k + s_{k-eta}

with n_k jobs at level k. It is the same for all jobs of a level and grows with the level.
"""

from collections.abc import Sequence

from fastserve_scheduler.core.config import CoreConfig
from fastserve_scheduler.core.job import Job
from fastserve_scheduler.core.policies import Order
from fastserve_scheduler.core.tally import in_ns
from fastserve_scheduler.core.wait_clock import WaitClock

ERROR_BOUNDS_NS = in_ns(-10, -3, -1, -0.3, -0.1, 0, 0.1, 0.3, 1, 3, 10, 30)
"""Upper bounds of the histogram of actual minus estimated time: when a job that was swapped out ran again."""


def execute_ns(quanta_ns: Sequence[int], sizes: Sequence[int], batch: int, eta: int = 1) -> list[int]:
    """T_execute of each level, in one pass over the levels."""
    total_ns, times = 0, list[int]()
    passing: list[int] = []
    for level, (quantum_ns, size) in enumerate(zip(quanta_ns, sizes, strict=True)):
        times.append(total_ns // batch)
        passing.append(size + (passing[level - eta] if level >= eta else 0))
        total_ns += quantum_ns * passing[level]
    return times


class Enst:
    """Estimates for the jobs of an order with levels; `known` is False for other orders."""

    def __init__(self, config: CoreConfig, order: Order, clock: WaitClock) -> None:
        self._order, self._clock = order, clock
        self._batch, self._eta = config.max_batch_size * config.num_stages, config.mlfq.eta
        self.known = bool(order.level_sizes())

    def execute_ns(self) -> list[int]:
        return execute_ns(self._order.quanta_ns(), self._order.level_sizes(), self._batch, self._eta)

    def promote_ns(self, job: Job, now_ns: int) -> int:
        return max(0, self._clock.deadline_ns(job) - now_ns)

    def of(self, job: Job, now_ns: int) -> int:
        return min(self.promote_ns(job, now_ns), self.execute_ns()[job.level])

    def margin_ns(self, job: Job) -> int:
        """How much sooner than the job another one must be due to take its place: a twentieth of alpha."""
        return self._clock.alpha_ns(job.service_class) // 20
