"""The one door to the scheduler's state: everyone puts messages here, one task takes them out.

Two lanes. What the cluster says (reports, stages coming and going, timers) goes first and is never refused: its
amount is bounded by the number of stages. What gateways say waits in a bounded lane; a full lane holds the gateway's
stream back, so a burst of requests delays other requests but never an iteration under way.
"""

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")

#: Gateway messages that wait for the scheduler's task; the next ones wait in their streams.
MAX_GATEWAY_MESSAGES = 1024


class Inbox(Generic[T]):
    """Order is kept within a lane. Only one task may `get`."""

    def __init__(self, limit: int = MAX_GATEWAY_MESSAGES) -> None:
        self._limit = limit
        self._cluster: deque[T] = deque()
        self._gateways: deque[T] = deque()
        self._filled = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    def __len__(self) -> int:
        return len(self._cluster) + len(self._gateways)

    def put_now(self, message: T) -> None:
        """The cluster's lane: at once, ahead of all gateway messages."""
        self._cluster.append(message)
        self._filled.set()

    async def put(self, message: T) -> None:
        """The gateways' lane: waits for room."""
        while len(self._gateways) >= self._limit:
            self._room.clear()
            await self._room.wait()
        self._gateways.append(message)
        self._filled.set()

    async def get(self) -> T:
        while True:
            if self._cluster:
                return self._cluster.popleft()
            if self._gateways:
                message = self._gateways.popleft()
                self._room.set()
                return message
            self._filled.clear()
            await self._filled.wait()
