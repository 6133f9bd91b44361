"""Least slack: the job whose next token is due first under the SLO. Who is late already comes after all who are not.

Without the second tier one late job makes the next one late (the domino of earliest deadline first under overload). Due
times are compared in steps of some seconds, so that two jobs do not take turns token by token.
"""

import heapq

from fastserve_scheduler.core.config import CoreConfig
from fastserve_scheduler.core.job import Job, Rank
from fastserve_scheduler.core.lengths import Lengths
from fastserve_scheduler.core.policies.order import TICKET_LANE
from fastserve_scheduler.core.policies.ticketed import Ticketed
from fastserve_scheduler.core.prediction import Predictor

ON_TIME, LATE = 0, 1


class Slack(Ticketed):
    def __init__(self, config: CoreConfig, predictor: Predictor, lengths: Lengths) -> None:
        super().__init__(config, predictor, lengths)
        #: (no later than its due time, id) of each job that is on time, once.
        self._watch: list[tuple[int, int]] = []
        self._on_time: dict[int, Job] = {}

    def join(self, job: Job) -> None:
        super().join(job)
        self._judge(job)

    def leave(self, job: Job) -> None:
        self._on_time.pop(job.job_id, None)

    def key_of(self, job: Job) -> int:
        """When the next token is due."""
        return job.arrived_ns + self._config.slo_first_token_ns + job.generated * self._config.slo_token_ns

    def rank(self, job: Job) -> Rank:
        if job.ticket:
            return (TICKET_LANE, 0, job.ticket_place)
        return (job.level, job.key // self._config.slack_step_ns, job.place)

    def ran(self, job: Job, spent_ns: int, turn_over: bool) -> None:
        super().ran(job, spent_ns, turn_over)
        self._judge(job)

    def overdue(self, limit: int) -> list[Job]:
        late: list[Job] = []
        while self._watch and self._watch[0][0] <= self.now_ns and len(late) < limit:
            _, job_id = heapq.heappop(self._watch)
            job = self._on_time.get(job_id)
            if job is None:
                continue
            if job.key > self.now_ns:
                heapq.heappush(self._watch, (job.key, job_id))
            else:
                del self._on_time[job_id]
                late.append(job)
        return late

    def age(self, job: Job) -> None:
        self._judge(job)

    def _judge(self, job: Job) -> None:
        job.level = ON_TIME if job.key > self.now_ns else LATE
        if job.level == ON_TIME and job.job_id not in self._on_time:
            self._on_time[job.job_id] = job
            heapq.heappush(self._watch, (job.key, job.job_id))
