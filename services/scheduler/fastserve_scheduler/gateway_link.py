"""One gateway's stream, as the scheduler sees it: a bounded queue of messages to say."""

import asyncio
import logging

from fastserve_scheduler.messages import SchedulerMessage

log = logging.getLogger(__name__)

#: Messages that wait for one gateway to read them. At this many the gateway is not reading: its stream is ended, and
#: its requests wait the grace period for it to come back.
MAX_OUTBOUND_MESSAGES = 16_384


class GatewayLink:
    """Sends never wait: a gateway that does not read loses its stream, nobody else's time."""

    def __init__(self, gateway_id: str, limit: int = MAX_OUTBOUND_MESSAGES) -> None:
        self.gateway_id = gateway_id
        self.closed = False
        self._limit = limit
        self._outbound: asyncio.Queue[SchedulerMessage | None] = asyncio.Queue()

    def send(self, message: SchedulerMessage) -> None:
        """Queue `message`; nothing happens on a closed link."""
        if self.closed:
            return
        if self._outbound.qsize() >= self._limit:
            log.warning("gateway does not read its stream; ending it", extra={"gateway": self.gateway_id})
            self.close()
            return
        self._outbound.put_nowait(message)

    def close(self) -> None:
        """What is queued is still delivered if the stream lives; then the stream ends."""
        if not self.closed:
            self.closed = True
            self._outbound.put_nowait(None)

    async def next(self) -> SchedulerMessage | None:
        """The next message to say; None when there will be no more."""
        return await self._outbound.get()
