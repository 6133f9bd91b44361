"""Jobs in line by level and by when they starve: what ENST ranks by, kept so that no look at it walks the jobs."""

from fastserve_scheduler.core.job import Job
from fastserve_scheduler.core.kv_state import KvState
from fastserve_scheduler.core.ranked import RankedJobs, by_deadline
from fastserve_scheduler.core.wait_clock import WaitClock


class DeadlineIndex:
    """The idle jobs with KV on the device and those with KV on the host. `Line` keeps it up to date."""

    def __init__(self, clock: WaitClock) -> None:
        self._clock = clock
        self._levels: dict[KvState, list[RankedJobs]] = {KvState.DEVICE: [], KvState.HOST: []}

    def levels(self, state: KvState) -> list[RankedJobs]:
        """One list of jobs per level, soonest to starve first; as many levels as were ever in use."""
        return self._levels[state]

    def add(self, job: Job) -> None:
        levels = self._levels.get(job.kv)
        if levels is None:
            return
        job.deadline = (self._clock.deadline_ns(job), job.job_id)
        while len(levels) <= job.level:
            levels.append(by_deadline())
        levels[job.level].add(job)

    def remove(self, job: Job) -> None:
        levels = self._levels.get(job.kv)
        if levels is not None:
            levels[job.level].remove(job)
