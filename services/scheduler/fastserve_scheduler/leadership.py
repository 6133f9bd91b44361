"""Which of several schedulers is the one: a lease in the state store.

A leader that cannot reach the store goes on: streams must not end with the store. Should another one lead meanwhile,
the stages obey the higher epoch, so the older leader can do no harm until it sees that its lease is gone.
"""

import asyncio
import logging
from dataclasses import dataclass

from fastserve_common.state import LEASE_TTL_S, StateError, StateStore

log = logging.getLogger(__name__)

LEASE = "scheduler"
GENERATION_COUNTER = "scheduler-generation"


@dataclass(frozen=True, slots=True)
class Leadership:
    store: StateStore
    owner: str
    ttl_s: float = LEASE_TTL_S

    async def acquire(self) -> int:
        """Wait until we lead. Returns the generation: higher than that of every leader before."""
        told = False
        while True:
            try:
                if await self.store.acquire(LEASE, self.owner, self.ttl_s):
                    return await self.store.increment(GENERATION_COUNTER)
                if not told:
                    log.info("another scheduler leads; standing by")
                    told = True
            except StateError as error:
                log.warning("cannot ask for leadership, will retry: %s", error)
            await asyncio.sleep(self.ttl_s / 6)

    async def try_acquire(self) -> int | None:
        """The generation, or None when another one leads. Raises StateError."""
        if not await self.store.acquire(LEASE, self.owner, self.ttl_s):
            return None
        return await self.store.increment(GENERATION_COUNTER)

    async def keep(self) -> None:
        """Renew until cancelled; returns when another one leads."""
        while True:
            await asyncio.sleep(self.ttl_s / 3)
            try:
                if not await self.store.acquire(LEASE, self.owner, self.ttl_s):
                    return
            except StateError as error:
                log.warning("cannot renew leadership, will retry: %s", error)

    async def give_up(self) -> None:
        try:
            await self.store.release(LEASE, self.owner)
        except StateError as error:
            log.warning("cannot release leadership, it will expire: %s", error)
