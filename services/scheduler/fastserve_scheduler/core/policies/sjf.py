"""Shortest job first, by expected total time. A shorter newcomer passes one that runs; nothing learnt later counts."""

from fastserve_scheduler.core.job import Job
from fastserve_scheduler.core.policies.ticketed import Ticketed


class Sjf(Ticketed):
    def join(self, job: Job) -> None:
        profile = self._predictor.profile
        tokens = self._lengths.expected_tokens(job)
        job.key = profile.prefill_ns(job.prompt_tokens) + (tokens - 1) * profile.min_decode_ns
        job.place = self._tail()

    def key_of(self, job: Job) -> int:
        return job.key
