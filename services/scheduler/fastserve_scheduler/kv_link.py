"""Finds the kvstore whose memory the stages share and keeps a session with it; says when slots come and go.

It is looked for only where all stages agree that they are attached: `aim` says at what. Every session introduces
itself under a name of its own, so that the kvstore frees what the one before it held, as the core does.
"""

import asyncio
import logging

import grpc.aio

from fastserve_common.state import StateError, StateStore
from fastserve_scheduler.inbox import Inbox
from fastserve_scheduler.inputs import HostGranted, HostLost, Input
from fastserve_scheduler.kv_messages import HostArena, KvHello
from fastserve_scheduler.kv_session import KvSession, KvSessionError

log = logging.getLogger(__name__)

FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.1, 2.0


class KvLink:
    """`run` it; everything else may be called at any time."""

    def __init__(self, store: StateStore, scheduler_id: str, epoch: int, inbox: Inbox[Input]) -> None:
        """`epoch`: of the scheduler's leadership; a kvstore refuses lower ones than it has seen."""
        self._store, self._scheduler_id, self._epoch, self._inbox = store, scheduler_id, epoch, inbox
        self._arena: HostArena | None = None
        self._aimed = asyncio.Event()
        self._session: KvSession | None = None
        self._attempt: asyncio.Task[bool] | None = None
        self._num_sessions = 0
        self._complaint = ""

    def aim(self, arena: HostArena | None) -> None:
        """All stages swap with `arena`; None: they do not, or not with the same one."""
        if arena == self._arena:
            return
        self._arena = arena
        if self._session is not None:
            self._session.closed = True
        if self._attempt is not None:
            self._attempt.cancel()
        if arena is None:
            self._aimed.clear()
        else:
            self._aimed.set()

    async def run(self) -> None:
        """Until cancelled."""
        backoff_s = FIRST_BACKOFF_S
        try:
            while True:
                await self._aimed.wait()
                self._attempt = asyncio.create_task(self._connect(), name="kvstore")
                await asyncio.wait([self._attempt])
                if self._attempt.cancelled():
                    backoff_s = FIRST_BACKOFF_S  # aimed elsewhere
                    continue
                served = self._attempt.result()
                backoff_s = FIRST_BACKOFF_S if served else min(2 * backoff_s, LAST_BACKOFF_S)
                await asyncio.sleep(backoff_s)
        finally:
            if self._attempt is not None:
                self._attempt.cancel()
                await asyncio.gather(self._attempt, return_exceptions=True)

    async def _connect(self) -> bool:
        """One session, or the attempt at one; whether slots were asked for. Why it ended is logged, once each."""
        arena = self._arena
        if arena is None:
            return False
        self._num_sessions += 1
        hello = KvHello(f"{self._scheduler_id}/{self._num_sessions}", self._epoch)
        session = self._session = KvSession(arena, hello, lambda slots: self._granted(session, slots))
        try:
            members = await self._store.members("kvstore")
            if arena.node not in members:
                raise KvSessionError("it is no member of the cluster")
            await session.run(members[arena.node]["address"])
        except KvSessionError as error:
            self._complain(arena, str(error))
        except TimeoutError:
            self._complain(arena, "no connection in time")
        except grpc.aio.AioRpcError as error:
            self._complain(arena, f"{error.code().name.lower()}: {error.details()}")
        except StateError as error:
            self._complain(arena, str(error))
        finally:
            self._session = None
            if session.opened:
                self._inbox.put_now(HostLost(session))
        return session.opened

    def _granted(self, session: KvSession, slots: tuple[int, ...]) -> None:
        if not session.closed:
            self._complaint = ""
            self._inbox.put_now(HostGranted(session, slots))

    def _complain(self, arena: HostArena, why: str) -> None:
        if why != self._complaint:
            self._complaint = why
            log.warning("no host memory for swapping, will retry: %s", why, extra={"node": arena.node})
