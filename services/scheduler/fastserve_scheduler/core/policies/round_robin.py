"""Round robin: one token each, then to the tail. What MLFQ with a short alpha becomes under load."""

from fastserve_scheduler.core.job import Job
from fastserve_scheduler.core.policies.fcfs import Fcfs


class RoundRobin(Fcfs):
    def ran(self, job: Job, spent_ns: int, turn_over: bool) -> None:
        if turn_over:
            job.place = self._tail()
