"""Messages to the inbox at a later time."""

import asyncio

from fastserve_scheduler.inbox import Inbox
from fastserve_scheduler.inputs import Input

#: A loop's timer counts in whole milliseconds: one more, and none is early.
_ROUNDING_S = 0.001


class Timers:
    def __init__(self, inbox: Inbox[Input]) -> None:
        self._inbox = inbox
        self._pending: set[asyncio.TimerHandle] = set()

    def after(self, delay_s: float, message: Input) -> None:
        """Put `message` into the cluster's lane, not before `delay_s` have passed."""

        def put() -> None:
            self._pending.discard(timer)
            self._inbox.put_now(message)

        timer = asyncio.get_running_loop().call_later(delay_s + _ROUNDING_S, put)
        self._pending.add(timer)

    def cancel_all(self) -> None:
        for timer in self._pending:
            timer.cancel()
        self._pending.clear()
