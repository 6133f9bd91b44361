"""Program-level attained service: what the calls of one agent had counts for its next one (Autellix).

A call joins the queue its program has come down to, or the one its first iteration needs if that is lower. A call that
names no program is one of its own. Starving calls are rescued as in every feedback queue.
"""

from collections import OrderedDict

from fastserve_scheduler.core.config import CoreConfig
from fastserve_scheduler.core.job import Job
from fastserve_scheduler.core.lengths import Lengths
from fastserve_scheduler.core.policies.skip_join_mlfq import SkipJoinMlfq
from fastserve_scheduler.core.prediction import Predictor

MAX_PROGRAMS = 65_536
"""Programs remembered; beyond that the one that ran longest ago starts anew."""


class Plas(SkipJoinMlfq):
    def __init__(self, config: CoreConfig, predictor: Predictor, lengths: Lengths) -> None:
        super().__init__(config, predictor, lengths)
        self._attained_ns: OrderedDict[str, int] = OrderedDict()

    def first_level(self, job: Job) -> int:
        attained_ns = self._attained_ns.get(job.program, 0) if job.program else 0
        level = 0
        while level < len(self.quantum_ns) - 1 and attained_ns >= self.quantum_ns[level]:
            attained_ns -= self.quantum_ns[level]
            level += 1
        return max(level, super().first_level(job))

    def ran(self, job: Job, spent_ns: int, turn_over: bool) -> None:
        super().ran(job, spent_ns, turn_over)
        if job.program:
            self._attained_ns[job.program] = self._attained_ns.get(job.program, 0) + spent_ns
            self._attained_ns.move_to_end(job.program)
            if len(self._attained_ns) > MAX_PROGRAMS:
                self._attained_ns.popitem(last=False)
