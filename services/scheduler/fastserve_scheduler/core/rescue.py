"""Rescue of starving jobs: promotion or a ticket, as the order says, at the pace the link can follow.

Promoting a job whose KV is on the host moves it in, and another one out. When many starve at once, as they do with a
short alpha, that alone would fill the link; so such promotions have half of one direction (`link.py`), and the others
wait for it, first come first served.
"""

from collections import Counter, deque
from collections.abc import Callable

from fastserve_scheduler.core.history import Happening
from fastserve_scheduler.core.job import Job
from fastserve_scheduler.core.kv_state import KvState
from fastserve_scheduler.core.policies import Order
from fastserve_scheduler.core.tiers import Tiers
from fastserve_scheduler.core.wait_clock import WaitClock

MAX_LIFTS_PER_STEP = 64
"""Starving jobs looked at in one step, so that a step stays short when many become due at once."""

_AWAY = frozenset({KvState.HOST, KvState.OUTGOING})


class Rescue:
    def __init__(
        self, order: Order, clock: WaitClock, tiers: Tiers, record: Callable[[Job, Happening, int], None]
    ) -> None:
        self._order, self._clock, self._tiers, self._record = order, clock, tiers, record
        #: Promotions by the queue that the job was in.
        self.promoted: Counter[int] = Counter()
        self.tickets = 0
        #: Times a starving job had to wait for the link's share.
        self.put_off = 0
        #: Starving jobs on the host, and the clock each of them starved by.
        self._waiting: deque[tuple[Job, int]] = deque()

    @property
    def promotions(self) -> int:
        return self.promoted.total()

    def step(self, now_ns: int) -> None:
        for _ in range(MAX_LIFTS_PER_STEP):
            if not self._lift_waiting(now_ns):
                break
        for job in self._clock.starving(now_ns, MAX_LIFTS_PER_STEP):
            if job.kv in _AWAY and (self._waiting or not self._afford(job, now_ns)):
                self._waiting.append((job, job.clock_ns))
                self.put_off += 1
            else:
                self._lift(job, now_ns)

    def rewire(self, order: Order) -> None:
        """Who starves is another order's business now."""
        self._order = order

    def restart_all(self, now_ns: int) -> None:
        """After an outage: nobody was passed over while nothing could run."""
        for job, clock_ns in self._waiting:
            if self._clock.waits(job) and job.clock_ns == clock_ns:
                self._clock.restart(job, now_ns)
        self._waiting.clear()
        self._clock.restart_all(now_ns)

    def _lift_waiting(self, now_ns: int) -> bool:
        """Deal with the first that waits; False: there is none, or the link's share is spent."""
        if not self._waiting:
            return False
        job, clock_ns = self._waiting[0]
        if self._clock.waits(job) and job.clock_ns == clock_ns:
            if job.kv in _AWAY and not self._afford(job, now_ns):
                return False
            self._lift(job, now_ns)
        self._waiting.popleft()
        return True

    def _afford(self, job: Job, now_ns: int) -> bool:
        return self._tiers.link.afford_promotion(self._tiers.pool.blocks_for(job.known_tokens), now_ns)

    def _lift(self, job: Job, now_ns: int) -> None:
        line = self._tiers.line
        line.take(job)
        job.rescued = True
        level = job.level
        if self._order.lift(job):
            self.tickets += 1
            self._record(job, Happening.TICKET, job.level)
        else:
            self._clock.restart(job, now_ns)
            self.promoted[level] += 1
            self._record(job, Happening.PROMOTED, job.level)
        line.put(job)
