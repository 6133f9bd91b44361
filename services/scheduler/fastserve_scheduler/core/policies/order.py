"""What a policy is: an order of jobs. Nothing else in the scheduler knows which policy runs.

An order gives each job a rank and changes it when the job has run or starves. It sees no memory, no batches and no
time of day, and it never moves a job by itself: the core takes the job out of line, lets the order write to it, and
puts it back under its new rank.
"""

from abc import ABC, abstractmethod

from fastserve_scheduler.core.config import CoreConfig, MlfqConfig
from fastserve_scheduler.core.job import Job, Rank
from fastserve_scheduler.core.prediction import Predictor


class Order(ABC):
    #: How many jobs that do not fit a batch may pass over before it looks at no more jobs without KV. Only an order
    #: that rescues starving jobs can afford more than 0: a job that is passed over may be passed over for ever.
    bypass_limit: int = 0
    #: A batch runs until all its jobs are finished; none joins it before.
    whole_batches: bool = False
    #: Starving jobs are given to `lift`.
    rescues: bool = False

    def __init__(self, config: MlfqConfig, predictor: Predictor, max_model_len: int) -> None:
        self._config = config
        self._predictor = predictor
        self._max_model_len = max_model_len
        self._next_place = 0

    @abstractmethod
    def join(self, job: Job) -> None:
        """A new job takes its place."""

    @abstractmethod
    def rank(self, job: Job) -> Rank:
        """The job's place in the order, from what is written on the job. Ranks of one order have one length."""

    def leave(self, job: Job) -> None:  # noqa: B027 - most orders keep nothing about a job
        """The job is gone for good."""

    def ran(self, job: Job, spent_ns: int, turn_over: bool) -> None:  # noqa: B027 - a static order learns nothing
        """The job was in an iteration of `spent_ns`. `turn_over` False: its next token needs more iterations."""

    def lift(self, job: Job) -> bool:
        """The job starves. True: it holds a ticket now, False: it was promoted and its clock starts again."""
        raise TypeError(f"{type(self).__name__} does not rescue starving jobs")

    def discards(self, job: Job) -> bool:
        """Whether the job's next first iteration is to be thrown away."""
        return False

    def reconfigure(self, config: CoreConfig) -> None:
        """The operator's wishes changed, but not the policy: jobs keep their places."""
        self._config = config.mlfq
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

    def _tail(self) -> int:
        self._next_place += 1
        return self._next_place
