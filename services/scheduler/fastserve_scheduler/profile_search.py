"""Getting a profile for the stages that have just joined, beside the driver's loop."""

import asyncio
import logging
from collections.abc import Sequence

from fastserve_scheduler.inbox import Inbox
from fastserve_scheduler.inputs import Input, ProfileFailed, ProfileKnown
from fastserve_scheduler.messages import Ready
from fastserve_scheduler.profiler import ProfileError, Profiler

log = logging.getLogger(__name__)

RETRY_S = 5.0


class ProfileSearch:
    """Tries until there is a profile or the stages are gone. What comes of it goes into the inbox."""

    def __init__(self, profiler: Profiler, inbox: Inbox[Input]) -> None:
        self._profiler, self._inbox = profiler, inbox
        self._task: asyncio.Task[None] | None = None
        #: In words, for whoever waits.
        self.state = "no profile yet"

    def begin(self, stages: Sequence[Ready], epoch: int) -> None:
        """For these stages in this epoch; a search before it is given up."""
        self.cancel()
        self.state = "measuring iteration times"
        self._task = asyncio.create_task(self._run(stages, epoch), name="profile")

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self, stages: Sequence[Ready], epoch: int) -> None:
        while True:
            try:
                self._inbox.put_now(ProfileKnown(await self._profiler.obtain(stages, epoch)))
                return
            except ProfileError as error:
                log.error("no profile: %s", error)
                self.state = f"no profile: {error}"
                self._inbox.put_now(ProfileFailed())
            await asyncio.sleep(RETRY_S)
