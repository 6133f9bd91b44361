"""Naive MLFQ, the paper's counterexample: every job joins Q1, whatever its first iteration takes.

What happens to a first iteration longer than the quantum is a choice: `finish` lets it run and demotes the job after
it; `abort` cuts it, as a time-sliced engine would: its work is lost and the job tries again one queue lower.
"""

from fastserve_scheduler.core.job import Job
from fastserve_scheduler.core.policies.feedback_queues import FeedbackQueues


class NaiveMlfq(FeedbackQueues):
    def first_level(self, job: Job) -> int:
        return 0

    def discards(self, job: Job) -> bool:
        """Decided before it runs, so that no token of a lost iteration is ever drawn. The last queue cuts nothing."""
        if self._mlfq.overrun == "finish" or job.started or job.level == len(self.quantum_ns) - 1:
            return False
        return self._predictor.first_iteration_ns(job.known_tokens) > self.quantum_ns[job.level]
