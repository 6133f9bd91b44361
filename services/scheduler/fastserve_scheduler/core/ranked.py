"""Jobs kept in rank order: a sorted list in short runs, so that no operation grows with the number of jobs.

A walk holds no iterator: it asks for the job after a rank, so evicting or adding jobs in the middle of it is safe.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator
from operator import attrgetter

from fastserve_scheduler.core.job import Job, Rank

RUN_LENGTH = 256
"""A run is cut in two at twice this length: moving 512 pointers costs less than one comparison of ranks."""

FIRST: Rank = ()
"""Below every rank."""


BY_RANK: Callable[[Job], Rank] = attrgetter("rank")
BY_DEADLINE: Callable[[Job], Rank] = attrgetter("deadline")


class RankedJobs:
    """Every job once, under the rank it had when it was added."""

    def __init__(self, key: Callable[[Job], Rank] = BY_RANK) -> None:
        self._key = key
        self._runs: list[list[Rank]] = []
        self._lasts: list[Rank] = []
        self._jobs: dict[Rank, Job] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return (self._jobs[rank] for run in self._runs for rank in run)

    def __contains__(self, job: Job) -> bool:
        return self._jobs.get(self._key(job)) is job

    def place(self, job: Job) -> Rank:
        """What the job is kept under here."""
        return self._key(job)

    def add(self, job: Job) -> None:
        rank = self._key(job)
        if rank in self._jobs:
            raise ValueError(f"rank {rank} is taken")
        self._jobs[rank] = job
        if not self._runs:
            self._runs.append([rank])
            self._lasts.append(rank)
            return
        index = min(bisect_left(self._lasts, rank), len(self._runs) - 1)
        run = self._runs[index]
        insort(run, rank)
        self._lasts[index] = run[-1]
        if len(run) > 2 * RUN_LENGTH:
            self._runs[index : index + 1] = [run[:RUN_LENGTH], run[RUN_LENGTH:]]
            self._lasts[index : index + 1] = [run[RUN_LENGTH - 1], run[-1]]

    def remove(self, job: Job) -> None:
        """Raises KeyError when the job is not here under its present rank."""
        rank = self._key(job)
        del self._jobs[rank]
        index = bisect_left(self._lasts, rank)
        run = self._runs[index]
        del run[bisect_left(run, rank)]
        if run:
            self._lasts[index] = run[-1]
        else:
            del self._runs[index], self._lasts[index]

    def after(self, rank: Rank) -> Job | None:
        """The first job behind `rank`."""
        index = bisect_right(self._lasts, rank)
        if index == len(self._runs):
            return None
        run = self._runs[index]
        return self._jobs[run[bisect_right(run, rank)]]

    def before(self, rank: Rank) -> Job | None:
        """The last job ahead of `rank`."""
        index = bisect_left(self._lasts, rank)
        if index < len(self._runs):
            run = self._runs[index]
            position = bisect_left(run, rank)
            if position:
                return self._jobs[run[position - 1]]
        return self._jobs[self._lasts[index - 1]] if index else None

    def last(self) -> Job | None:
        return self._jobs[self._lasts[-1]] if self._lasts else None


def by_deadline() -> RankedJobs:
    """Ordered by when they starve."""
    return RankedJobs(BY_DEADLINE)
