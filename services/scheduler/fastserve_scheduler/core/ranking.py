"""Who leaves the device first and who comes back first. Two ways to say it, one interface.

`order`: the last in the order leaves, the first comes back. `enst`: the largest estimated next scheduled time leaves,
the smallest comes back. Neither walks the jobs: what it is asked for next costs O(levels).
"""

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterator

from fastserve_scheduler.core.deadlines import DeadlineIndex
from fastserve_scheduler.core.enst import Enst
from fastserve_scheduler.core.job import Job
from fastserve_scheduler.core.kv_state import KvState
from fastserve_scheduler.core.line import Line
from fastserve_scheduler.core.ranked import FIRST, RankedJobs


class Ranking(ABC):
    """Jobs may be moved while an iterator of these runs."""

    @abstractmethod
    def leaving(self, now_ns: int) -> Iterator[Job]:
        """Idle jobs on the device, the first to leave first."""

    @abstractmethod
    def coming(self, now_ns: int) -> Iterator[Job]:
        """Jobs on the host, the first to come back first."""

    @abstractmethod
    def displaces(self, comer: Job, victim: Job, now_ns: int) -> bool:
        """The comer is so much sooner due than the victim that moving both is worth it."""

    def hurried(self, job: Job, now_ns: int) -> bool:
        """It ranks where it does because its promotion is near."""
        return False


class OrderRanking(Ranking):
    def __init__(self, line: Line) -> None:
        self._line = line

    def leaving(self, now_ns: int) -> Iterator[Job]:
        return _downwards(self._line.ready)

    def coming(self, now_ns: int) -> Iterator[Job]:
        return _upwards(self._line.hosted)

    def displaces(self, comer: Job, victim: Job, now_ns: int) -> bool:
        """A better level: within one, whoever is on the device stays."""
        return victim.rank[:-1] > comer.rank[:-1]


class EnstRanking(Ranking):
    def __init__(self, enst: Enst, deadlines: DeadlineIndex) -> None:
        self._enst, self._deadlines = enst, deadlines

    def leaving(self, now_ns: int) -> Iterator[Job]:
        return self._by_enst(KvState.DEVICE, now_ns, largest_first=True)

    def coming(self, now_ns: int) -> Iterator[Job]:
        return self._by_enst(KvState.HOST, now_ns, largest_first=False)

    def displaces(self, comer: Job, victim: Job, now_ns: int) -> bool:
        sooner_ns = self._enst.of(victim, now_ns) - self._enst.of(comer, now_ns)
        return sooner_ns > self._enst.margin_ns(victim)

    def hurried(self, job: Job, now_ns: int) -> bool:
        return self._enst.promote_ns(job, now_ns) < self._enst.execute_ns()[job.level]

    def _by_enst(self, state: KvState, now_ns: int, *, largest_first: bool) -> Iterator[Job]:
        """All jobs of the state by ENST: within a level they are sorted by deadline, so the levels are merged."""
        execute_ns = self._enst.execute_ns()
        sign = -1 if largest_first else 1
        levels = (
            _keyed(jobs, execute_ns[level], now_ns, sign)
            for level, jobs in enumerate(self._deadlines.levels(state))
            if len(jobs)
        )
        return (job for _, job in heapq.merge(*levels, key=_key))


_Key = tuple[int, int, int]


def _keyed(jobs: RankedJobs, execute_ns: int, now_ns: int, sign: int) -> Iterator[tuple[_Key, Job]]:
    """(ENST, deadline, id), all times `sign`; the id of each job breaks the tie that is left."""
    for job in _downwards(jobs) if sign < 0 else _upwards(jobs):
        deadline_ns, job_id = job.deadline
        enst_ns = min(max(0, deadline_ns - now_ns), execute_ns)
        yield (sign * enst_ns, sign * deadline_ns, sign * job_id), job


def _key(pair: tuple[_Key, Job]) -> _Key:
    return pair[0]


def _upwards(jobs: RankedJobs) -> Iterator[Job]:
    job = jobs.after(FIRST)
    while job is not None:
        place = jobs.place(job)
        yield job
        job = jobs.after(place)


def _downwards(jobs: RankedJobs) -> Iterator[Job]:
    job = jobs.last()
    while job is not None:
        place = jobs.place(job)
        yield job
        job = jobs.before(place)
