"""The stage's own thread: everything that computes runs there, in order, and the event loop stays free.

Health and reports are answered while an iteration computes; style rule of the house: never compute on the loop.
"""

import asyncio
import concurrent.futures
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from fastserve_common.errors import ResourceExhaustedError

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Pieces of work waiting for the thread. The scheduler keeps as many iterations in flight as there are stages.
MAX_QUEUED_WORK = 64

_Work = Callable[[], None]


class StageRunner:
    """A daemon thread with a bounded queue: a computation that never ends cannot keep the process from ending."""

    def __init__(self, name: str = "stage", max_queued: int = MAX_QUEUED_WORK) -> None:
        self._queue: queue.Queue[_Work | None] = queue.Queue(max_queued)
        self._begun_s: float | None = None
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def busy_s(self) -> float:
        """For how long the piece of work in progress has been running; 0 when there is none. Callable anywhere."""
        begun_s = self._begun_s
        return 0.0 if begun_s is None else time.monotonic() - begun_s

    def submit(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        """Run `work` after everything submitted before. Cancelling the future drops work that has not
        begun by the loop's next turn.

        Raises ResourceExhaustedError when too much is waiting.
        """
        done: concurrent.futures.Future[T] = concurrent.futures.Future()

        def step() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                result = work()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(result)

        try:
            self._queue.put_nowait(step)
        except queue.Full as error:
            raise ResourceExhaustedError(
                f"more than {self._queue.maxsize} pieces of work wait for the stage"
            ) from error
        return asyncio.wrap_future(done)

    def _loop(self) -> None:
        while (step := self._queue.get()) is not None:
            self._begun_s = time.monotonic()
            step()
            self._begun_s = None
            del step  # the last step's tensors would live until the next one

    async def close(self, timeout_s: float) -> bool:
        """Let what was submitted finish, then end the thread. False when it did not within `timeout_s`."""
        try:
            await asyncio.to_thread(self._queue.put, None, timeout=timeout_s)
        except queue.Full:
            return False
        await asyncio.to_thread(self._thread.join, timeout_s)
        return not self._thread.is_alive()
