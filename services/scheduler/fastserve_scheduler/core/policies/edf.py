"""Earliest deadline first: when the whole expected answer is due under the SLO; a request's priority goes before it."""

from fastserve_scheduler.core.job import Job, Rank
from fastserve_scheduler.core.policies.order import TICKET_LANE
from fastserve_scheduler.core.policies.ticketed import Ticketed


class Edf(Ticketed):
    def join(self, job: Job) -> None:
        tokens = self._lengths.expected_tokens(job)
        job.key = job.arrived_ns + self._config.slo_first_token_ns + (tokens - 1) * self._config.slo_token_ns
        job.place = self._tail()

    def key_of(self, job: Job) -> int:
        return job.key

    def rank(self, job: Job) -> Rank:
        return (TICKET_LANE, 0, 0, job.ticket_place) if job.ticket else (0, job.priority, job.key, job.place)
