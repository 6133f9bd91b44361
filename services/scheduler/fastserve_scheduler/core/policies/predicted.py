"""By expected length where somebody can tell, by feedback queues where nobody can, in one order.

A job joins as in skip-join MLFQ. With its first token it goes to Q1: its prefill is paid, and what it still needs is
what counts; so new prompts do not pass an answer that is about to end. After a probe of some tokens it goes on by
expected remaining x expected total output while a guesser is believed (`lengths.py`), and down the queues when none is.
Both are measured on one scale, the job's share of the device: a job that still needs what Q_i grants ranks with those
in Q_i. So jobs with hints and without share one line.

Iterations are charged by share, whatever the configuration says: an answer in a full batch costs the device a
sixteenth of what a prompt of the same time costs it. A starving job has a burst of tokens before all queues, and goes
on where it was; nobody starves before two rounds over all jobs would have taken place, because rescuing everybody is
first come, first served at the price of a prefill each.
"""

from fastserve_scheduler.core.config import CoreConfig
from fastserve_scheduler.core.job import Job, Rank
from fastserve_scheduler.core.lengths import ONE, UNKNOWN, Lengths, exp2, log2
from fastserve_scheduler.core.policies.order import TICKET_LANE
from fastserve_scheduler.core.policies.skip_join_mlfq import SkipJoinMlfq
from fastserve_scheduler.core.prediction import Predictor

WEIGHT = 64
"""One token moves the mean cost of a token by 1/64 of the way."""

STEPS = 4
"""Places between two levels. Finer ones gain nothing measurable and have jobs pass each other more often."""

MIN_ROUNDS = 2
"""Rounds over all jobs before one of them starves."""


class Predicted(SkipJoinMlfq):
    burst_turns = 8

    def __init__(self, config: CoreConfig, predictor: Predictor, lengths: Lengths) -> None:
        super().__init__(config, predictor, lengths)
        #: Moving mean of what a token costs a job that has had its first one.
        self._token_ns = 0

    def charge_ns(self, compute_ns: int, num_jobs: int) -> int:
        return compute_ns // num_jobs

    @property
    def alpha_rounds(self) -> int:
        return max(self._config.mlfq.alpha_rounds, MIN_ROUNDS)

    def join(self, job: Job) -> None:
        super().join(job)
        job.key = job.level * STEPS

    def rank(self, job: Job) -> Rank:
        return (TICKET_LANE, job.ticket_place) if job.ticket else (job.key, job.place)

    def ran(self, job: Job, spent_ns: int, turn_over: bool) -> None:
        job.used_ns += spent_ns
        if not turn_over:
            return
        self._spend_turn(job)
        if job.started and not job.landed:
            job.landed = True
            self._move(job, 0)
            job.key = 0
            return
        self._token_ns += (spent_ns - self._token_ns) // WEIGHT
        guess = self._lengths.believed(job)
        if guess != UNKNOWN and job.generated >= self._config.probe_tokens:
            self._place_by(job, guess)
        elif self._used_up(job):
            below = min(job.level + self._mlfq.eta, len(self.quantum_ns) - 1)
            self._demotions[job.level] += below > job.level
            self._move(job, below)
            job.key = below * STEPS

    def lift(self, job: Job) -> bool:
        self._give_ticket(job)
        return True

    def _place_by(self, job: Job, guess: int) -> None:
        """The geometric mean of remaining and total output, as device time over q1, is the level."""
        remaining = max(exp2(guess) - job.generated, 1)
        tokens = (log2(remaining) + max(guess, log2(job.generated))) // 2
        key = tokens + log2(max(self._token_ns, 1)) - log2(self.quantum_ns[0])
        job.key = max(key, 0) * STEPS // ONE
        level = min(job.key // STEPS, len(self.quantum_ns) - 1)
        if level != job.level:
            self._sizes[job.level] -= 1
            self._sizes[level] += 1
            job.level, job.used_ns = level, 0
