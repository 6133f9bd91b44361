"""Shortest remaining processing time: the oracle. Needs the true output length, so it serves comparisons only."""

from fastserve_scheduler.core.job import Job, Rank
from fastserve_scheduler.core.policies.order import Order


class Srpt(Order):
    def join(self, job: Job) -> None:
        job.place = self._tail()
        self._estimate(job)

    def ran(self, job: Job, spent_ns: int, turn_over: bool) -> None:
        self._estimate(job)

    def rank(self, job: Job) -> Rank:
        return (job.level, job.place)

    def _estimate(self, job: Job) -> None:
        """Remaining time in ns, kept where other orders keep their level."""
        tokens = max(job.oracle_output_tokens - job.generated, 1)
        first_ns = self._predictor.profile.min_decode_ns
        if not job.started:
            first_ns = self._predictor.profile.prefill_ns(job.known_tokens)
        job.level = first_ns + (tokens - 1) * self._predictor.profile.min_decode_ns
