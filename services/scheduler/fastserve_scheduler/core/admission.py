"""The door: refuse at once, by name and with a limit, what could not be served or would only make the queue longer."""

from fastserve_scheduler.core.blocks import BlockPool
from fastserve_scheduler.core.commands import RejectJob, RejectReason
from fastserve_scheduler.core.config import CoreConfig
from fastserve_scheduler.core.events import JobArrived
from fastserve_scheduler.core.prediction import Predictor

NOT_READY_RETRY_NS = 1_000_000_000
MIN_RETRY_NS = 100_000_000
MAX_RETRY_NS = 60_000_000_000


class Door:
    def __init__(self, config: CoreConfig, pool: BlockPool, predictor: Predictor) -> None:
        self._config, self._pool, self._predictor = config, pool, predictor

    def refuse(self, event: JobArrived, ready: bool, waiting_jobs: int, waiting_tokens: int) -> RejectJob | None:
        """Why the job may not come in, or None. `waiting_*`: accepted jobs not running, and their prompt tokens."""
        limit = min(self._config.max_model_len, self._pool.num_tokens) if ready else self._config.max_model_len
        if event.prompt_tokens + event.max_output_tokens > limit:
            return RejectJob(event.job_id, RejectReason.TOO_LONG, 0, limit)
        if not ready:
            return RejectJob(event.job_id, RejectReason.NOT_READY, NOT_READY_RETRY_NS, 0)
        # The line is shorter once its prompts have run; nothing better is known about answers of unknown length.
        retry_ns = min(max(self._predictor.first_iteration_ns(max(waiting_tokens, 1)), MIN_RETRY_NS), MAX_RETRY_NS)
        if waiting_jobs >= self._config.max_waiting_jobs:
            return RejectJob(event.job_id, RejectReason.QUEUE_FULL_JOBS, retry_ns, self._config.max_waiting_jobs)
        if waiting_tokens + event.prompt_tokens > self._config.max_waiting_tokens:
            return RejectJob(event.job_id, RejectReason.QUEUE_FULL_TOKENS, retry_ns, self._config.max_waiting_tokens)
        return None
