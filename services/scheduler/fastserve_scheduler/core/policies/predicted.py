"""By expected length where somebody can tell, by feedback queues where nobody can, in one order.

A job joins as in skip-join MLFQ, in finer steps, or earlier where prompt and expected answer together deserve it. With
its first token it goes to Q1: its prefill is paid, and what it still needs is what counts; so new prompts do not pass
an answer that is about to end. After a probe of some tokens it goes on by expected remaining x expected total output
while a guesser is believed (`lengths.py`), and down the queues when none is. All are measured on one scale, the job's
share of the device: a job that still needs what Q_i grants ranks with those in Q_i. So jobs with hints and without
share one line.

Iterations are charged by share, whatever the configuration says: an answer in a full batch costs the device a
sixteenth of what a prompt of the same time costs it. A starving job has a burst of tokens before all queues, and goes
on where it was; nobody starves before eight rounds over all jobs would have taken place, because rescuing everybody is
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

MIN_ROUNDS = 8
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
        first_ns = self._predictor.first_iteration_ns(job.known_tokens)
        job.key = self._key(log2(first_ns))
        guess = self._lengths.believed(job)
        if guess != UNKNOWN and self._token_ns:
            work = log2(first_ns // self._token_ns + exp2(guess))
            job.key = min(job.key, self._key((work + guess) // 2 + log2(self._token_ns)))

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
        self._token_ns = max(1, self._token_ns + (spent_ns - self._token_ns) // WEIGHT) if self._token_ns else spent_ns
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

    def _key(self, log_ns: int) -> int:
        """Where a job belongs that needs so much device time: Q1 ends at q1, and each further level at twice that."""
        return max(0, -(-(log_ns - log2(self.quantum_ns[0])) * STEPS // ONE))

    def _place_by(self, job: Job, guess: int) -> None:
        """By the geometric mean of remaining and total output.

        A job that has outlived its guess may need as much again: so a guess that is too small gains nothing for long.
        """
        expected = exp2(guess)
        remaining = expected - job.generated if job.generated < expected else job.generated
        tokens = (log2(remaining) + max(guess, log2(job.generated))) // 2
        job.key = self._key(tokens + log2(self._token_ns))
        level = min(job.key // STEPS, len(self.quantum_ns) - 1)
        if level != job.level:
            self._sizes[job.level] -= 1
            self._sizes[level] += 1
            job.level, job.used_ns = level, 0
