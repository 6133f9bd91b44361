"""What a policy is: an order of jobs. Nothing else in the scheduler knows which policy runs.

An order gives each job a rank and changes it when the job has run, starves, or has a time of its own come. It sees no
memory and no batches, and it never moves a job by itself: the core takes the job out of line, lets the order write to
it, and puts it back under its new rank.
"""

from abc import ABC, abstractmethod

from fastserve_scheduler.core.config import CoreConfig
from fastserve_scheduler.core.job import Job, Rank
from fastserve_scheduler.core.lengths import Lengths
from fastserve_scheduler.core.prediction import Predictor

TICKET_LANE = -1
"""Before every level, and before every key."""


class Order(ABC):
    #: How many jobs that do not fit a batch may pass over before it looks at no more jobs without KV. Only an order
    #: that rescues starving jobs can afford more than 0: a job that is passed over may be passed over for ever.
    bypass_limit: int = 0
    #: A batch runs until all its jobs are finished; none joins it before.
    whole_batches: bool = False
    #: Starving jobs are given to `lift`.
    rescues: bool = False
    #: Tokens that a ticket is good for.
    burst_turns: int = 1

    def __init__(self, config: CoreConfig, predictor: Predictor, lengths: Lengths) -> None:
        self._config = config
        self._predictor = predictor
        self._lengths = lengths
        self._next_place = 0
        #: Time of the event being handled. Written by the core.
        self.now_ns = 0

    @abstractmethod
    def join(self, job: Job) -> None:
        """A new job takes its place."""

    @abstractmethod
    def rank(self, job: Job) -> Rank:
        """The job's place in the order, from what is written on the job. Ranks of one order have one length."""

    def leave(self, job: Job) -> None:  # noqa: B027 - most orders keep nothing about a job
        """The job is gone for good."""

    def ran(self, job: Job, spent_ns: int, turn_over: bool) -> None:  # noqa: B027 - a static order learns nothing
        """The job ran and is charged `spent_ns`. `turn_over` False: its next token needs more iterations."""

    def charge_ns(self, compute_ns: int, num_jobs: int) -> int:
        """What each of the jobs of an iteration is charged."""
        return compute_ns // num_jobs if self._config.mlfq.charge == "share" else compute_ns

    @property
    def alpha_rounds(self) -> int:
        """No job starves before so many rounds over all jobs would have taken place."""
        return self._config.mlfq.alpha_rounds

    def overdue(self, limit: int) -> list[Job]:
        """Up to `limit` jobs whose place time alone has changed: the core takes those in line out, and calls `age`."""
        return []

    def age(self, job: Job) -> None:  # noqa: B027 - as `overdue`
        """Time has changed the place of the job."""

    def lift(self, job: Job) -> bool:
        """The job starves. True: it holds a ticket now, False: it was promoted and its clock starts again."""
        raise TypeError(f"{type(self).__name__} does not rescue starving jobs")

    def discards(self, job: Job) -> bool:
        """Whether the job's next first iteration is to be thrown away."""
        return False

    def reconfigure(self, config: CoreConfig) -> None:
        """The operator's wishes changed, but not the policy: jobs keep their places."""
        self._config = config
        self.retime()

    def retime(self) -> None:  # noqa: B027 - only quanta depend on the profile
        """The profile changed."""

    def level_sizes(self) -> tuple[int, ...]:
        """Jobs of each level, running ones included; empty where the order has no levels."""
        return ()

    def quanta_ns(self) -> tuple[int, ...]:
        """The quantum of each level; empty where the order has none."""
        return ()

    def demotions(self) -> tuple[int, ...]:
        """How many jobs were demoted from each level so far; empty where the order has none."""
        return ()

    def _give_ticket(self, job: Job) -> None:
        if not job.ticket:
            job.ticket, job.turns, job.ticket_place = True, self.burst_turns, self._tail()

    def _spend_turn(self, job: Job) -> None:
        if job.ticket:
            job.turns -= 1
            job.ticket = job.turns > 0

    def _tail(self) -> int:
        self._next_place += 1
        return self._next_place
