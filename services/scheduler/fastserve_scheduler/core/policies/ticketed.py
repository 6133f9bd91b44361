"""Orders by a key of their own that rescue starving jobs by a ticket: some tokens before everybody, then back."""

from abc import abstractmethod

from fastserve_scheduler.core.job import Job, Rank
from fastserve_scheduler.core.policies.order import TICKET_LANE, Order


class Ticketed(Order):
    """The rank is (key, place); a place is that of the arrival, so equals do not take turns."""

    bypass_limit = 32
    rescues = True

    def join(self, job: Job) -> None:
        job.place = self._tail()
        job.key = self.key_of(job)

    @abstractmethod
    def key_of(self, job: Job) -> int:
        """What the job ranks by now; not negative."""

    def rank(self, job: Job) -> Rank:
        return (TICKET_LANE, job.ticket_place) if job.ticket else (job.key, job.place)

    def ran(self, job: Job, spent_ns: int, turn_over: bool) -> None:
        job.used_ns += spent_ns
        if turn_over:
            self._spend_turn(job)
            job.key = self.key_of(job)

    def lift(self, job: Job) -> bool:
        self._give_ticket(job)
        return True
