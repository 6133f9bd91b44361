"""The state store as limits use it, which all gateways share: asked quickly, left alone while it does not answer.

The store is no judge of whether a model may serve: while it is away, or slow, requests are let through.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import TypeVar

from fastserve_common.state import StateError, StateStore

log = logging.getLogger(__name__)

#: The longest that a request waits for the store.
ASK_TIMEOUT_S = 0.5
#: A store that did not answer is not asked again for so long.
PAUSE_S = 1.0

#: Whose request this is: what `KeyCheck.check` returned. All callers without a key are one.
caller: ContextVar[str] = ContextVar("caller", default="")

T = TypeVar("T")


class SharedCounts:
    def __init__(self, store: StateStore, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock_s = clock_s
        self._ask_again_s = 0.0

    async def ask(self, question: Callable[[StateStore], Awaitable[T]]) -> T | None:
        """None: there is nobody to ask. The question may have reached the store all the same."""
        if self._clock_s() < self._ask_again_s:
            return None
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                return await question(self._store)
        except (StateError, TimeoutError) as error:
            self._ask_again_s = self._clock_s() + PAUSE_S
            log.warning(
                "rate limits are not checked, the state store does not answer: %s", error or "no answer in time"
            )
            return None
