"""Multi-level feedback queues: quanta, accounts, demotion, promotion. How a job joins is the subclass's choice.

The rank is (level, place). Level -1 is the lane of ticket holders, served before Q1: a starving job that must not be
promoted to Q1 runs there until its next token and goes back to the front of the queue it never really left.
"""

from abc import abstractmethod

from fastserve_scheduler.core.config import CoreConfig
from fastserve_scheduler.core.job import Job, Rank
from fastserve_scheduler.core.lengths import Lengths
from fastserve_scheduler.core.policies.order import TICKET_LANE, Order
from fastserve_scheduler.core.prediction import Predictor

MIN_LEVELS = 10
"""Fewer queues than 8 mix long jobs with longer ones (measured: docs/scheduling.md); each more costs a counter."""


class FeedbackQueues(Order):
    bypass_limit = 32
    rescues = True

    def __init__(self, config: CoreConfig, predictor: Predictor, lengths: Lengths) -> None:
        super().__init__(config, predictor, lengths)
        self._mlfq = config.mlfq
        self._front_place = 0
        self.quantum_ns: tuple[int, ...] = ()
        self._sizes: list[int] = []
        self._demotions: list[int] = []
        self.retime()

    @abstractmethod
    def first_level(self, job: Job) -> int:
        """The queue a new job joins."""

    def join(self, job: Job) -> None:
        job.level = job.joined_level = self.first_level(job)
        job.place = self._tail()
        self._sizes[job.level] += 1

    def leave(self, job: Job) -> None:
        self._sizes[job.level] -= 1

    def rank(self, job: Job) -> Rank:
        return (TICKET_LANE if job.ticket else job.level, job.place)

    def ran(self, job: Job, spent_ns: int, turn_over: bool) -> None:
        job.used_ns += spent_ns
        if not turn_over:
            return
        if job.ticket:
            job.ticket = False
            job.place = self._front()
        if job.started and not job.landed and self._mlfq.after_prefill == "top":
            self._move(job, 0)
        elif self._used_up(job):
            below = min(job.level + self._mlfq.eta, len(self.quantum_ns) - 1)
            self._demotions[job.level] += below > job.level
            self._move(job, below)
        job.landed = job.started

    def lift(self, job: Job) -> bool:
        """Promote to Q1 with a fresh quantum, or hand out a ticket.

        A ticket goes to a job without a first token (Q1's quantum does not cover its first iteration), to one that
        starves in Q1 itself, and to everybody under `return`.
        """
        if self._mlfq.promotion == "return" or not job.started or job.level == 0:
            job.ticket = True
            job.place = self._tail()
            return True
        self._move(job, 0)
        return False

    def reconfigure(self, config: CoreConfig) -> None:
        self._mlfq = config.mlfq
        super().reconfigure(config)

    def retime(self) -> None:
        """Quanta from the profile: q_1 is the shortest iteration there is. Levels in use are never taken away."""
        q1_ns, ratio = self._predictor.profile.min_decode_ns, self._mlfq.ratio
        count = self._mlfq.num_levels
        if count == 0:
            longest_ns = self._predictor.profile.prefill_ns(self._config.max_model_len)
            count = MIN_LEVELS
            while q1_ns * ratio ** (count - 1) < longest_ns:
                count += 1
        count = max(count, len(self._sizes))
        self.quantum_ns = tuple(q1_ns * ratio**level for level in range(count))
        self._sizes += [0] * (count - len(self._sizes))
        self._demotions += [0] * (count - len(self._demotions))

    def level_sizes(self) -> tuple[int, ...]:
        return tuple(self._sizes)

    def quanta_ns(self) -> tuple[int, ...]:
        return self.quantum_ns

    def demotions(self) -> tuple[int, ...]:
        return tuple(self._demotions)

    def _used_up(self, job: Job) -> bool:
        quantum_ns = self.quantum_ns[job.level]
        match self._mlfq.demote_when:
            case "used-reaches":
                return job.used_ns >= quantum_ns
            case "used-exceeds":
                return job.used_ns > quantum_ns
            case "next-would-exceed":
                return job.used_ns + self._predictor.profile.decode_ns(1, job.known_tokens) > quantum_ns

    def _move(self, job: Job, level: int) -> None:
        """To the tail of a queue with a fresh account; from the last queue to its own tail."""
        self._sizes[job.level] -= 1
        self._sizes[level] += 1
        job.level, job.used_ns, job.place = level, 0, self._tail()

    def _front(self) -> int:
        self._front_place -= 1
        return self._front_place
