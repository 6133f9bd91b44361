"""How long jobs waited for copies alone, and how long the device did. Sums over jobs, so they may exceed the time.

*Blocked* is a job that would be in the batch just formed, had every copy landed by now: the walk reached it while a
slot was left for it, and it waits for its own KV, for blocks that are on their way out, or for the link. *Roomless* is
a job on the host that the walk reached likewise but that would find no blocks whatever landed: memory is short for it,
not bandwidth. Both last from one formed batch to the next, because it is a batch that the job misses. *Stalled* is the
device when no batch is in flight and some job is blocked.
"""


class DueClock:
    def __init__(self) -> None:
        self.blocked_ns = 0
        self.roomless_ns = 0
        self.stalled_ns = 0
        self._num_blocked = self._num_roomless = 0
        self._idle = False
        self._at_ns = 0

    def note(self, now_ns: int, num_blocked: int, num_roomless: int, *, idle: bool) -> None:
        """A batch was formed: who waits from now on for what. `idle`: nothing is in flight."""
        passed_ns, self._at_ns = now_ns - self._at_ns, now_ns
        self.blocked_ns += self._num_blocked * passed_ns
        self.roomless_ns += self._num_roomless * passed_ns
        if self._idle and self._num_blocked:
            self.stalled_ns += passed_ns
        self._num_blocked, self._num_roomless, self._idle = num_blocked, num_roomless, idle
