"""Which of several schedulers is the one: a lease in the state store.

A leader that cannot reach the store goes on: streams must not end with the store. Should another one lead meanwhile,
the stages obey the higher epoch, so the older leader can do no harm until it sees that its lease is gone.

The order of leaders outlives the store. One that was wiped counts from one again, and stages would refuse the next
leader for ever; so a generation is no less than the time of day in seconds, and higher than any that a standby saw.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from fastserve_common.state import DEFAULT_GROUP, LEASE_TTL_S, StateError, StateStore, in_group

log = logging.getLogger(__name__)

LEASE = "scheduler"
GENERATION_COUNTER = "scheduler-generation"
ROLE, MEMBER = "scheduler", "leader"


@dataclass(slots=True)
class Leadership:
    store: StateStore
    owner: str
    group: str = DEFAULT_GROUP
    ttl_s: float = LEASE_TTL_S
    #: Seconds since 1970.
    clock_s: Callable[[], float] = time.time
    #: The highest generation seen while standing by.
    _seen: int = 0

    @property
    def lease(self) -> str:
        return in_group(LEASE, self.group)

    @property
    def member(self) -> str:
        """The name that the leader registers under."""
        return in_group(MEMBER, self.group)

    async def acquire(self) -> int:
        """Wait until we lead. Returns the generation: higher than that of every leader before."""
        told = False
        while True:
            try:
                generation = await self.try_acquire()
                if generation is not None:
                    return generation
                await self._look()
                if not told:
                    log.info("another scheduler leads; standing by")
                    told = True
            except StateError as error:
                log.warning("cannot ask for leadership, will retry: %s", error)
            await asyncio.sleep(self.ttl_s / 6)

    async def try_acquire(self) -> int | None:
        """The generation, or None when another one leads. Raises StateError."""
        if not await self.store.acquire(self.lease, self.owner, self.ttl_s):
            return None
        return await self.store.increment(
            in_group(GENERATION_COUNTER, self.group), max(self._seen + 1, int(self.clock_s()))
        )

    async def _look(self) -> None:
        """Remember whom we stand by for."""
        leader = (await self.store.members(ROLE)).get(self.member, {})
        self._seen = max(self._seen, int(leader.get("generation", 0)))

    def facts(self, address: str, generation: int) -> dict[str, str]:
        """What the leader registers as."""
        return {"address": address, "incarnation": self.owner, "generation": str(generation)}

    async def keep(self) -> None:
        """Renew until cancelled; returns when another one leads."""
        while True:
            await asyncio.sleep(self.ttl_s / 3)
            try:
                if not await self.store.acquire(self.lease, self.owner, self.ttl_s):
                    return
            except StateError as error:
                log.warning("cannot renew leadership, will retry: %s", error)

    async def give_up(self) -> None:
        try:
            await self.store.release(self.lease, self.owner)
        except StateError as error:
            log.warning("cannot release leadership, it will expire: %s", error)
