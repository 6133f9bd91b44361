"""One gateway's stream, as the scheduler sees it: a bounded queue of messages to say."""

import asyncio
import logging
from collections import deque
from typing import Protocol

from fastserve_scheduler.messages import Batch, Finished, Rejected, SchedulerMessage, Tokens

log = logging.getLogger(__name__)

#: Messages that wait for one gateway to read them. At this many the gateway is not reading: its stream is ended, and
#: its requests wait the grace period for it to come back.
MAX_OUTBOUND_MESSAGES = 16_384

#: Messages of one batch, so that it stays far below the cap of a stream message.
MAX_BATCH_MESSAGES = 256


class Peer(Protocol):
    """Whom messages go to: a gateway's stream, or one replica's branch of it. Sends never wait."""

    @property
    def gateway_id(self) -> str: ...

    @property
    def closed(self) -> bool: ...

    def send(self, message: SchedulerMessage) -> None: ...

    def close(self) -> None: ...


class GatewayLink:
    """Sends never wait: a gateway that does not read loses its stream, nobody else's time.

    What waits when the stream is free goes as one batch, to a gateway that takes them.
    """

    def __init__(self, gateway_id: str, *, batches: bool = False, limit: int = MAX_OUTBOUND_MESSAGES) -> None:
        self.gateway_id = gateway_id
        self.closed = False
        self._batches, self._limit = batches, limit
        self._outbound: deque[SchedulerMessage] = deque()
        self._filled = asyncio.Event()

    def send(self, message: SchedulerMessage) -> None:
        """Queue `message`; nothing happens on a closed link."""
        if self.closed:
            return
        if len(self._outbound) >= self._limit:
            log.warning("gateway does not read its stream; ending it", extra={"gateway": self.gateway_id})
            self.close()
            return
        self._outbound.append(message)
        self._filled.set()

    def close(self) -> None:
        """What is queued is still delivered if the stream lives; then the stream ends."""
        self.closed = True
        self._filled.set()

    async def next(self) -> SchedulerMessage | None:
        """The next message to say; None when there will be no more. One task only."""
        while not self._outbound:
            if self.closed:
                return None
            self._filled.clear()
            await self._filled.wait()
            await asyncio.sleep(0)  # the plan that the same report led to leaves first: encoding overlaps computing
        first = self._outbound.popleft()
        if not self._batches or not isinstance(first, Tokens | Finished | Rejected):
            return first
        together = [first]
        while self._outbound and len(together) < MAX_BATCH_MESSAGES:
            following = self._outbound[0]
            if not isinstance(following, Tokens | Finished | Rejected):
                break
            together.append(following)
            self._outbound.popleft()
        return Batch(tuple(together)) if len(together) > 1 else first
