"""Least attained service: who has had the least time runs first. In steps of the shortest iteration."""

from fastserve_scheduler.core.job import Job
from fastserve_scheduler.core.policies.ticketed import Ticketed


class Las(Ticketed):
    def key_of(self, job: Job) -> int:
        return job.used_ns // self._predictor.profile.min_decode_ns
