"""Parts of the link that know nothing of requests: messages waiting to be said, tasks that live together."""

import asyncio
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field

from fastserve.v1 import scheduler_pb2


@dataclass(slots=True)
class Outbox:
    """Messages for the scheduler, in order. Bounded by what is live: one submit and one cancel per answer."""

    messages: deque[scheduler_pb2.GatewayMessage] = field(default_factory=deque)
    ready: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, message: scheduler_pb2.GatewayMessage) -> None:
        self.messages.append(message)
        self.ready.set()

    def clear(self) -> None:
        self.messages.clear()
        self.ready.clear()

    async def take(self) -> scheduler_pb2.GatewayMessage:
        while not self.messages:
            self.ready.clear()
            await self.ready.wait()
        return self.messages.popleft()


async def first_to_fail(*parts: Coroutine[None, None, None]) -> None:
    """Run them together; when one raises, stop the others and raise it."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
