"""The gateway's one stream to a group's scheduler: find it, talk, and after a break come back with everything live.

A request outlives the scheduler it was sent to: it is submitted again, under its id and with the ids that have
arrived, to whoever leads the group next. Only when nobody has come back for `reconnect_timeout_s` does another group
go on with what is live, or, where there is none, does it fail.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass, replace
from typing import TypeAlias

import grpc
import grpc.aio

from fastserve.v1 import scheduler_pb2, scheduler_pb2_grpc
from fastserve_common.channels import open_channel
from fastserve_common.errors import FastServeError, UnavailableError
from fastserve_common.state import DEFAULT_GROUP, StateError, StateStore, in_group
from fastserve_gateway import codec
from fastserve_gateway.codec import CancelReason
from fastserve_gateway.engine.events import ClusterView, Failed, Load
from fastserve_gateway.engine.outbox import Outbox, first_to_fail
from fastserve_gateway.engine.sequence import Sequence

log = logging.getLogger(__name__)

#: What schedulers are in the state store, and what the one that leads the default group is called there.
ROLE, LEADER_MEMBER = "scheduler", "leader"

HELLO_TIMEOUT_S = 5.0
#: Pause between attempts to connect: doubles from the first to the last, with jitter.
BACKOFF_FIRST_S, BACKOFF_LAST_S = 0.1, 2.0
#: How often to look whether someone else leads now: a frozen scheduler keeps its connections open.
LEADER_POLL_S = 1.0
#: Cancels that the scheduler has not confirmed yet; beyond that the oldest is forgotten.
MAX_UNCONFIRMED_CANCELS = 65_536
#: Pause before a request is submitted again that a scheduler without all its stages refused.
RESUBMIT_PAUSE_S = 0.25

Stream: TypeAlias = "grpc.aio.StreamStreamCall[scheduler_pb2.GatewayMessage, scheduler_pb2.SchedulerMessage]"


class LinkLostError(Exception):
    """The stream ended; a sentence that says how."""


@dataclass(frozen=True, slots=True)
class Leader:
    address: str
    incarnation: str


class SchedulerLink:
    def __init__(
        self,
        store: StateStore,
        gateway_id: str,
        *,
        reconnect_timeout_s: float,
        group: str = DEFAULT_GROUP,
        on_change: Callable[[ClusterView], None] = lambda view: None,
        elsewhere: Callable[[Sequence, Several[str]], bool] = lambda sequence, tried: False,
    ) -> None:
        """`on_change` is called whenever `view` has changed, or which model is served. `elsewhere`: whether a group
        that is none of those named goes on with a sequence.
        """
        self.group = group
        self.view = ClusterView()
        self.load = Load()
        #: Prompt tokens and requests that were sent since `load` came.
        self.sent_tokens = self.sent_live = 0
        self._elsewhere = elsewhere
        self._store = store
        self._gateway_id = gateway_id
        self._reconnect_timeout_s = reconnect_timeout_s
        self._on_change = on_change
        self._outbox = Outbox()
        self._live: dict[str, Sequence] = {}
        self._unconfirmed: dict[str, CancelReason] = {}
        self._give_up: asyncio.TimerHandle | None = None
        self._resubmits: dict[str, asyncio.TimerHandle] = {}
        #: None while there is no stream.
        self._channel: grpc.aio.Channel | None = None

    @property
    def num_live(self) -> int:
        return len(self._live)

    def knows(self, wire_id: str) -> bool:
        """Whether the scheduler may still speak of a request under that id."""
        return wire_id in self._live or wire_id in self._unconfirmed

    def submit(self, sequence: Sequence) -> None:
        """From here until it ended, failed or was cancelled the sequence hears what the scheduler says."""
        self._live[sequence.wire_id] = sequence
        self.sent_tokens += len(sequence.submission.prompt_ids)
        self.sent_live += 1
        if self.view.connected:
            self._outbox.put(codec.submit_to_wire(sequence.submission, sequence.received))

    def cancel(self, wire_id: str, reason: CancelReason) -> None:
        """Forget the sequence and tell the scheduler. No effect for one that is not live."""
        if self._live.pop(wire_id, None) is None:
            return
        self._drop_timer(wire_id)
        self._take_back(wire_id, reason)

    def _take_back(self, wire_id: str, reason: CancelReason) -> None:
        """Until the scheduler confirms it, over its restarts too."""
        self._unconfirmed[wire_id] = reason
        if len(self._unconfirmed) > MAX_UNCONFIRMED_CANCELS:
            del self._unconfirmed[next(iter(self._unconfirmed))]
        if self.view.connected:
            self._outbox.put(codec.cancel_to_wire(wire_id, reason))

    async def scheduler_state(self) -> scheduler_pb2.GetStateResponse:
        """What the scheduler shows to people. Raises LinkLostError, AioRpcError."""
        if self._channel is None:
            raise LinkLostError(self.view.detail)
        return await scheduler_pb2_grpc.SchedulerStub(self._channel).GetState(scheduler_pb2.GetStateRequest())

    # --- the connection

    async def run(self) -> None:
        """Until cancelled."""
        backoff_s = BACKOFF_FIRST_S
        try:
            while True:
                try:
                    leader = await self._leader()
                    await self._converse(leader)
                except LinkLostError as error:
                    if self.view.connected:
                        backoff_s = BACKOFF_FIRST_S
                    self._detach(str(error))
                await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
                backoff_s = min(backoff_s * 2, BACKOFF_LAST_S)
        finally:
            self.view = replace(self.view, connected=False, ready=False, detail="the gateway is shutting down")
            self._cancel_timers()

    async def _leader(self) -> Leader:
        try:
            members = await self._store.members(ROLE)
        except StateError as error:
            raise LinkLostError(f"the state store does not answer: {error}") from error
        info = members.get(in_group(LEADER_MEMBER, self.group))
        if info is None or "address" not in info:
            raise LinkLostError("no scheduler is registered")
        return Leader(info["address"], info.get("incarnation", ""))

    async def _converse(self, leader: Leader) -> None:
        """One stream, from hello to its end. Raises LinkLostError."""
        async with open_channel(leader.address) as channel:
            call: Stream = scheduler_pb2_grpc.SchedulerStub(channel).Connect()
            try:
                async with asyncio.timeout(HELLO_TIMEOUT_S):  # wait_for may lose a cancellation: the task never ended
                    hello = await self._greet(call)
                self._attach(hello, leader)
                self._channel = channel
                await first_to_fail(self._read(call), self._write(call), self._watch(leader))
            except TimeoutError as error:
                raise LinkLostError(f"the scheduler at {leader.address} does not answer") from error
            except grpc.aio.AioRpcError as error:
                raise LinkLostError(
                    f"the stream to {leader.address} broke: {error.code().name} {error.details()}"
                ) from error
            except asyncio.InvalidStateError as error:  # a write after the stream had ended
                raise LinkLostError(f"the stream to {leader.address} ended") from error
            finally:
                self._channel = None
                call.cancel()

    async def _greet(self, call: Stream) -> scheduler_pb2.SchedulerHello:
        await call.write(codec.hello_to_wire(self._gateway_id))
        first = await call.read()
        if not isinstance(first, scheduler_pb2.SchedulerMessage) or first.WhichOneof("message") != "hello":
            raise LinkLostError("the scheduler did not introduce itself")
        return first.hello

    async def _read(self, call: Stream) -> None:
        while True:
            message = await call.read()
            if not isinstance(message, scheduler_pb2.SchedulerMessage):
                raise LinkLostError("the scheduler ended the stream")
            for part in codec.parts_of(message):
                self._dispatch(part)

    async def _write(self, call: Stream) -> None:
        while True:
            await call.write(await self._outbox.take())

    async def _watch(self, leader: Leader) -> None:
        """Ends the conversation when another scheduler leads. A store that is away changes nothing."""
        while True:
            await asyncio.sleep(LEADER_POLL_S)
            with contextlib.suppress(LinkLostError):
                if await self._leader() != leader:
                    break
        raise LinkLostError("another scheduler leads now")

    # --- state

    def _attach(self, hello: scheduler_pb2.SchedulerHello, leader: Leader) -> None:
        detail = "the scheduler has not reported its stages yet"
        self.view = codec.view_from_wire(hello, ClusterView(connected=True, detail=detail))
        self._on_load(Load())
        facts = {"address": leader.address, "generation": hello.generation, "group": self.group}
        log.info("connected to scheduler", extra=facts)
        self._cancel_timers()
        self._outbox.clear()
        for wire_id, reason in self._unconfirmed.items():
            self._outbox.put(codec.cancel_to_wire(wire_id, reason))
        for sequence in list(self._live.values()):
            self._resubmit(sequence)
        self._on_change(self.view)

    def _detach(self, why: str) -> None:
        was_connected = self.view.connected
        changed = was_connected or self.view.detail != why
        self.view = replace(self.view, connected=False, ready=False, detail=why)
        if was_connected:
            log.warning("lost the scheduler: %s", why, extra={"live": len(self._live), "group": self.group})
            self._outbox.clear()
            for sequence in self._live.values():
                sequence.accepted = True
            loop = asyncio.get_running_loop()
            self._give_up = loop.call_later(self._reconnect_timeout_s, self._fail_all)
        if changed:
            self._on_change(self.view)

    def _fail_all(self) -> None:
        problem = f"the scheduler did not come back within {self._reconnect_timeout_s:g} s"
        error = UnavailableError(problem, retry_after_ms=codec.DEFAULT_RETRY_MS)
        for sequence in list(self._live.values()):
            self._end(sequence)
            if self._elsewhere(sequence, [self.group]):
                self._take_back(sequence.wire_id, CancelReason.CLIENT)
            else:
                sequence.failed(Failed(error, "error"))

    def _cancel_timers(self) -> None:
        if self._give_up is not None:
            self._give_up.cancel()
            self._give_up = None
        for wire_id in list(self._resubmits):
            self._drop_timer(wire_id)

    def _drop_timer(self, wire_id: str) -> None:
        timer = self._resubmits.pop(wire_id, None)
        if timer is not None:
            timer.cancel()

    def _resubmit(self, sequence: Sequence) -> None:
        self._drop_timer(sequence.wire_id)
        ended = sequence.complete()
        if ended is not None:
            self._end(sequence)
            sequence.ended(ended)
        elif self.view.connected:
            self._outbox.put(codec.submit_to_wire(sequence.submission, sequence.received))

    def _end(self, sequence: Sequence) -> None:
        self._live.pop(sequence.wire_id, None)
        self._drop_timer(sequence.wire_id)

    # --- what the scheduler says

    def _dispatch(self, message: scheduler_pb2.SchedulerMessage) -> None:
        match message.WhichOneof("message"):
            case "tokens":
                self._on_tokens(message.tokens)
            case "finished":
                self._unconfirmed.pop(message.finished.request_id, None)
                sequence = self._live.get(message.finished.request_id)
                if sequence is not None:
                    self._end(sequence)
                    sequence.ended(codec.ended_from_wire(message.finished))
            case "rejected":
                self._on_rejected(message.rejected)
            case "hello":  # its limits have changed: a stage told how much it holds
                self.view = codec.view_from_wire(message.hello, self.view)
                self._on_change(self.view)
            case "status":
                self.view = replace(self.view, ready=message.status.ready, detail=message.status.detail)
                self._on_change(self.view)
            case "load":
                self._on_load(codec.load_from_wire(message.load))
            case _:
                log.debug("ignoring a message of a newer scheduler")

    def _on_load(self, load: Load) -> None:
        another_model = load.fingerprint != self.load.fingerprint
        self.load, self.sent_tokens, self.sent_live = load, 0, 0
        if another_model:
            self._on_change(self.view)

    def _on_tokens(self, tokens: scheduler_pb2.Tokens) -> None:
        sequence = self._live.get(tokens.request_id)
        if sequence is None:
            return
        try:
            in_order = sequence.tokens(tokens.offset, codec.tokens_from_wire(tokens))
        except ValueError as error:
            in_order = False
            sequence.failed(Failed(FastServeError(f"the scheduler sent broken tokens: {error}"), "error"))
        if not in_order:
            log.error("tokens out of order or broken; giving up the request", extra={"request_id": tokens.request_id})
            self.cancel(tokens.request_id, CancelReason.CLIENT)

    def _on_rejected(self, rejected: scheduler_pb2.Rejected) -> None:
        self._unconfirmed.pop(rejected.request_id, None)
        sequence = self._live.get(rejected.request_id)
        if sequence is None:
            return
        transient = sequence.accepted and rejected.reason in codec.TRANSIENT_REFUSALS
        transient |= sequence.resumes and rejected.reason == scheduler_pb2.REJECT_REASON_DUPLICATE_ID
        if transient and sequence.refused_for_s() < self._reconnect_timeout_s:
            loop = asyncio.get_running_loop()
            self._drop_timer(sequence.wire_id)
            self._resubmits[sequence.wire_id] = loop.call_later(RESUBMIT_PAUSE_S, self._resubmit, sequence)
            return
        self._end(sequence)
        sequence.tried.append(self.group)
        if rejected.reason not in codec.TRANSIENT_REFUSALS or not self._elsewhere(sequence, sequence.tried):
            sequence.failed(codec.failed_from_wire(rejected))
