"""Skip-join MLFQ, the paper's policy: a job joins the queue whose quantum covers its first iteration."""

from fastserve_scheduler.core.job import Job
from fastserve_scheduler.core.policies.feedback_queues import FeedbackQueues


class SkipJoinMlfq(FeedbackQueues):
    def first_level(self, job: Job) -> int:
        """The highest queue i with q_i >= t_init, so that a correct prediction never cuts a first iteration."""
        t_init_ns = self._predictor.first_iteration_ns(job.known_tokens)
        last = len(self.quantum_ns) - 1
        return next((level for level, quantum_ns in enumerate(self.quantum_ns) if quantum_ns >= t_init_ns), last)
