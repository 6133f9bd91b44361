"""How long jobs waited only for their KV: they were reached in the order while the batch had room, and were away."""

from collections.abc import Sequence

from fastserve_scheduler.core.job import Job


class DueClock:
    def __init__(self) -> None:
        self.blocked_ns = 0
        self._since_ns: dict[int, int] = {}

    def note(self, due: Sequence[Job], now_ns: int) -> None:
        """The jobs reached in vain by the walk at `now_ns`; who was among those before and is not now waits no more."""
        since_ns = {job.job_id: self._since_ns.pop(job.job_id, now_ns) for job in due}
        self.blocked_ns += sum(now_ns - begin_ns for begin_ns in self._since_ns.values())
        self._since_ns = since_ns
