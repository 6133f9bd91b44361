"""A scheduler without stages: it says scripted token ids, at the pace the test sets, over the real protocol."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from fastserve.v1 import sampling_pb2, scheduler_pb2, scheduler_pb2_grpc
from fastserve_common.channels import GrpcServer, full_names
from fastserve_common.packed import pack_u32, unpack_u32
from fastserve_common.state import DEFAULT_GROUP, StateStore, in_group

Context = grpc.aio.ServicerContext[Any, Any]
Message = scheduler_pb2.SchedulerMessage
CLIENT = scheduler_pb2.CANCEL_REASON_CLIENT
STOP_STRING = scheduler_pb2.CANCEL_REASON_STOP_STRING

MAX_BATCH = 256


@dataclass
class Script:
    """What one request gets. `gate`: one permit per message of tokens; None: as fast as they go."""

    ids: Sequence[int] = ()
    chunk: int = 1
    gate: asyncio.Semaphore | None = None
    #: Over and over, until max_tokens or a cancel.
    endless: bool = False
    #: Said instead of tokens.
    reject: scheduler_pb2.RejectReason.ValueType | None = None
    retry_after_ms: int = 0
    #: How it ends when the ids run out; None: it never does.
    finish: scheduler_pb2.StopReason.ValueType | None = scheduler_pb2.STOP_REASON_LENGTH
    #: Of a token, said when asked for; None: withheld.
    logprobs: Callable[[int], sampling_pb2.TokenLogprobs] | None = lambda token_id: sampling_pb2.TokenLogprobs(
        token_id=token_id, logprob=-1.0
    )
    #: Added to every offset: a broken scheduler.
    skew: int = 0


@dataclass
class Job:
    submit: scheduler_pb2.SubmitRequest
    sent: int = 0
    cancelled: scheduler_pb2.CancelReason.ValueType | None = None
    done: bool = False
    task: asyncio.Task[None] | None = None

    @property
    def prompt(self) -> list[int]:
        return list(unpack_u32(self.submit.prompt_token_ids))

    @property
    def delivered(self) -> list[int]:
        return list(unpack_u32(self.submit.delivered_token_ids))


@dataclass
class FakeScheduler(scheduler_pb2_grpc.SchedulerServicer):
    """`script(submit)` decides what a request gets; everything it was told is kept for the test to look at."""

    script: Callable[[scheduler_pb2.SubmitRequest], Script]
    max_model_len: int = 1000
    max_request_tokens: int = 1000
    ready: bool = True
    generation: int = 0
    group: str = DEFAULT_GROUP
    load: scheduler_pb2.Load | None = None
    jobs: list[Job] = field(default_factory=list)
    hellos: list[str] = field(default_factory=list)
    #: Messages that went out as part of a batch. A stream says what waits for it in one, as the scheduler does.
    batched: int = 0
    #: What people are shown, how often it was asked for, and what the answer waits for.
    state: scheduler_pb2.GetStateResponse = field(default_factory=lambda: scheduler_pb2.GetStateResponse(policy="fake"))
    states_asked: int = 0
    state_gate: asyncio.Event | None = None
    _server: GrpcServer | None = None
    _store: StateStore | None = None
    _streams: list[asyncio.Queue[Message | None]] = field(default_factory=list)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self, store: StateStore) -> None:
        self.generation += 1
        self._server = GrpcServer.create(full_names(scheduler_pb2.DESCRIPTOR))
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(self, self._server.server)
        port = await self._server.start("127.0.0.1:0")
        self._store = store
        info = {"address": f"127.0.0.1:{port}", "incarnation": str(self.generation)}
        await store.register("scheduler", self.member, info, 3600)

    @property
    def member(self) -> str:
        return in_group("leader", self.group)

    async def stop(self) -> None:
        """As if killed: streams break, the registration stays until the next one replaces it."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.server.stop(None)
            self._server = None
        self._streams.clear()
        for job in self.jobs:
            job.done = True

    def set_ready(self, ready: bool, detail: str = "") -> None:
        self.ready = ready
        self._say(scheduler_pb2.SchedulerMessage(status=scheduler_pb2.ClusterStatus(ready=ready, detail=detail)))

    def set_load(self, load: scheduler_pb2.Load) -> None:
        self.load = load
        self._say(scheduler_pb2.SchedulerMessage(load=load))

    def set_limit(self, tokens: int) -> None:
        self.max_request_tokens = tokens
        self._say(scheduler_pb2.SchedulerMessage(hello=self._hello()))

    def job(self, request_id: str) -> Job:
        return next(job for job in reversed(self.jobs) if job.submit.request_id == request_id)

    def live(self) -> list[Job]:
        return [job for job in self.jobs if not job.done]

    def _hello(self) -> scheduler_pb2.SchedulerHello:
        return scheduler_pb2.SchedulerHello(
            generation=self.generation,
            max_model_len=self.max_model_len,
            max_request_tokens=self.max_request_tokens,
            policy="fake",
            num_stages=2,
        )

    def _say(self, message: Message) -> None:
        for stream in self._streams:
            stream.put_nowait(message)

    async def Connect(
        self, request_iterator: AsyncIterator[scheduler_pb2.GatewayMessage], context: Context
    ) -> AsyncIterator[Message]:
        hello = await anext(request_iterator)
        self.hellos.append(hello.hello.gateway_id)
        assert hello.hello.accepts_batches
        stream: asyncio.Queue[Message | None] = asyncio.Queue()
        stream.put_nowait(scheduler_pb2.SchedulerMessage(hello=self._hello()))
        status = scheduler_pb2.ClusterStatus(ready=self.ready, detail="" if self.ready else "stage 0 is missing")
        stream.put_nowait(scheduler_pb2.SchedulerMessage(status=status))
        if self.load is not None:
            stream.put_nowait(scheduler_pb2.SchedulerMessage(load=self.load))
        self._streams.append(stream)
        self._spawn(self._listen(request_iterator, stream))
        while True:
            for message in self._together(await _next_of(stream)):
                if message is None:
                    return
                yield message

    def _together(self, messages: Sequence[Message | None]) -> Iterator[Message | None]:
        """The same in order, neighbours about requests as one batch."""
        for in_batch, group in itertools.groupby(messages, _in_batches):
            parts = list(group)
            if not in_batch or len(parts) == 1:
                yield from parts
                continue
            self.batched += len(parts)
            yield scheduler_pb2.SchedulerMessage(batch=scheduler_pb2.MessageBatch(messages=filter(None, parts)))

    async def GetState(
        self, request: scheduler_pb2.GetStateRequest, context: Context
    ) -> scheduler_pb2.GetStateResponse:
        self.states_asked += 1
        if self.state_gate is not None:
            await self.state_gate.wait()
        return self.state

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _listen(
        self, messages: AsyncIterator[scheduler_pb2.GatewayMessage], stream: asyncio.Queue[Message | None]
    ) -> None:
        with contextlib.suppress(grpc.aio.UsageError, asyncio.CancelledError):
            async for message in messages:
                if message.HasField("submit"):
                    job = Job(message.submit)
                    self.jobs.append(job)
                    job.task = self._spawn(self._run(job, stream))
                elif message.HasField("cancel"):
                    self._cancel(message.cancel, stream)
        stream.put_nowait(None)

    def _cancel(self, cancel: scheduler_pb2.CancelRequest, stream: asyncio.Queue[Message | None]) -> None:
        for job in self.jobs:
            if job.submit.request_id == cancel.request_id and not job.done:
                job.cancelled = cancel.reason
                if job.task is not None:
                    job.task.cancel()
                self._finish(job, scheduler_pb2.STOP_REASON_CANCELLED, stream)

    def _finish(
        self,
        job: Job,
        reason: scheduler_pb2.StopReason.ValueType,
        stream: asyncio.Queue[Message | None],
        stop_token_id: int = 0,
    ) -> None:
        job.done = True
        finished = scheduler_pb2.Finished(
            request_id=job.submit.request_id, reason=reason, stop_token_id=stop_token_id, output_tokens=job.sent
        )
        stream.put_nowait(scheduler_pb2.SchedulerMessage(finished=finished))

    async def _run(self, job: Job, stream: asyncio.Queue[Message | None]) -> None:
        script = self.script(job.submit)
        if script.reject is not None:
            job.done = True
            rejected = scheduler_pb2.Rejected(
                request_id=job.submit.request_id,
                reason=script.reject,
                message="refused by the script",
                retry_after_ms=script.retry_after_ms,
            )
            stream.put_nowait(scheduler_pb2.SchedulerMessage(rejected=rejected))
            return
        job.sent = len(job.delivered)
        while not job.done:
            ids = self._next_ids(job, script)
            if not ids:
                break
            if script.gate is not None:
                await script.gate.acquire()
            stop = self._send(job, script, ids, stream)
            if stop is not None:
                self._finish(job, *stop)
            else:
                await asyncio.sleep(0)
        if not job.done and script.finish is not None:
            self._finish(job, script.finish, stream)

    def _next_ids(self, job: Job, script: Script) -> list[int]:
        room = job.submit.max_tokens - job.sent
        wanted = min(script.chunk, room)
        if script.endless:
            return [script.ids[(job.sent + k) % len(script.ids)] for k in range(wanted)]
        return list(script.ids[job.sent : job.sent + wanted])

    def _send(
        self, job: Job, script: Script, ids: list[int], stream: asyncio.Queue[Message | None]
    ) -> tuple[scheduler_pb2.StopReason.ValueType, asyncio.Queue[Message | None], int] | None:
        """Send up to a stop token; returns how the job ends, if it does."""
        stops = set(job.submit.stop_token_ids)
        stop_at = next((k for k, i in enumerate(ids) if i in stops and job.sent + k >= job.submit.min_tokens), None)
        if stop_at is not None:
            ids = ids[: stop_at + 1]
        tokens = scheduler_pb2.Tokens(
            request_id=job.submit.request_id, offset=job.sent + script.skew, token_ids=pack_u32(ids)
        )
        if script.logprobs is not None and job.submit.sampling.HasField("logprobs"):
            tokens.logprobs.extend(map(script.logprobs, ids))
        job.sent += len(ids)
        stream.put_nowait(scheduler_pb2.SchedulerMessage(tokens=tokens))
        if stop_at is not None:
            return scheduler_pb2.STOP_REASON_STOP_TOKEN, stream, ids[-1]
        if job.sent >= job.submit.max_tokens:
            return scheduler_pb2.STOP_REASON_LENGTH, stream, 0
        return None


async def _next_of(stream: asyncio.Queue[Message | None]) -> list[Message | None]:
    """What waits; at least one."""
    waiting = [await stream.get()]
    while not stream.empty() and len(waiting) < MAX_BATCH:
        waiting.append(stream.get_nowait())
    return waiting


def _in_batches(message: Message | None) -> bool:
    return message is not None and message.WhichOneof("message") in ("tokens", "finished", "rejected")
