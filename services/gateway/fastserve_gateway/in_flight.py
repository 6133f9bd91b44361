"""How many answers of one API key may be in progress at once, over all gateways.

Every gateway says in the state store how many it has of each key, and takes more only if all together stay within the
limit. What it said is forgotten some seconds later unless it says so again, so a gateway that died holds nobody up,
and a store that was wiped knows again soon. While the store is away a gateway counts its own answers alone.
"""

import asyncio
import contextlib
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial

from fastserve_common.errors import ResourceExhaustedError
from fastserve_common.state import Occupied, StateStore
from fastserve_gateway.codec import DEFAULT_RETRY_MS
from fastserve_gateway.metrics import Metrics
from fastserve_gateway.shared import SharedCounts, caller

#: Answers of a gateway that is gone count for so long.
TTL_S = 10.0
#: How often a gateway says what it has.
RENEW_S = TTL_S / 3


class TooManyInFlightError(ResourceExhaustedError):
    """The key has as many answers in progress as it may have."""


@dataclass(slots=True)
class _Owner:
    #: Answers in progress here.
    held: int = 0
    #: What is said of the owner is said in order.
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class InFlight:
    """`limit` 0: none, and the store is not asked. As many owners are remembered as there are keys."""

    def __init__(self, shared: SharedCounts, metrics: Metrics, gateway_id: str, *, limit: int) -> None:
        self._shared = shared
        self._metrics = metrics
        self._gateway_id = gateway_id
        self._limit = limit
        self._owners: defaultdict[str, _Owner] = defaultdict(_Owner)
        #: Owners of which something is to be said now.
        self._news: dict[str, None] = {}
        self._has_news = asyncio.Event()

    def places(self, num_answers: int) -> "Places":
        """For one request of the `caller`. One with more answers than the limit has them all: it must wait until
        nothing else is in progress, but it is not refused for ever.
        """
        return Places(self, caller.get(), min(num_answers, self._limit))

    async def run(self) -> None:
        """Until cancelled: say what was given back at once, and everything once in a while."""
        loop = asyncio.get_running_loop()
        renew_at_s = loop.time() + RENEW_S
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(renew_at_s):
                    await self._has_news.wait()
            if loop.time() >= renew_at_s:
                renew_at_s = loop.time() + RENEW_S
                self._news.update(dict.fromkeys(name for name, owner in self._owners.items() if owner.held))
            await self.tell()

    async def tell(self) -> None:
        """Say what is new. What the store does not hear is said again with the next news, or forgotten by itself."""
        self._has_news.clear()
        news, self._news = self._news, {}
        for name in news:
            owner = self._owners[name]
            async with owner.turn:
                if await self._shared.ask(partial(self._occupy, name, owner.held, 0)) is None:
                    self._news[name] = None

    async def take(self, name: str, num_places: int) -> None:
        """Raises TooManyInFlightError."""
        owner = self._owners[name]
        async with owner.turn:
            if owner.held + num_places > self._limit:
                raise self._refusal()
            try:
                occupied = await self._shared.ask(partial(self._occupy, name, owner.held, num_places))
            except BaseException:
                self._is_news(name)  # the store may have granted them
                raise
            if occupied is None:
                self._metrics.quota_unchecked.inc()
            elif not occupied.granted:
                raise self._refusal()
            owner.held += num_places  # some may have been given back meanwhile

    def give_back(self, name: str, num_places: int) -> None:
        self._owners[name].held -= num_places
        self._is_news(name)

    def _is_news(self, name: str) -> None:
        self._news[name] = None
        self._has_news.set()

    async def _occupy(self, name: str, held: int, more: int, store: StateStore) -> Occupied:
        return await store.occupy(name, self._gateway_id, held, more, self._limit, TTL_S)

    def _refusal(self) -> TooManyInFlightError:
        self._metrics.admission_rejected("max_concurrent_requests_per_key")
        return TooManyInFlightError(
            f"{self._limit} answers of this key are in progress (--max-concurrent-requests-per-key)",
            retry_after_ms=DEFAULT_RETRY_MS,
        )


@dataclass(slots=True)
class Places:
    """Of one request: taken before it begins, given back when it ends."""

    _in_flight: InFlight
    _owner: str
    _num_places: int
    _taken: bool = False

    async def take(self) -> None:
        """Raises TooManyInFlightError."""
        if self._num_places:
            await self._in_flight.take(self._owner, self._num_places)
            self._taken = True

    def give_back(self) -> None:
        """Nothing happens when they were not taken, or given back before."""
        if self._taken:
            self._taken = False
            self._in_flight.give_back(self._owner, self._num_places)
