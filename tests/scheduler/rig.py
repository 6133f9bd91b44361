"""A whole scheduler in this process: real gRPC on loopback, scripted stages, gateways that check what they get."""

import asyncio
import contextlib
import itertools
from array import array
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Self, cast

import grpc.aio

from fastserve.v1 import sampling_pb2, scheduler_pb2, scheduler_pb2_grpc
from fastserve_common.channels import open_channel
from fastserve_common.state import DEFAULT_GROUP, StateStore, in_group, open_state
from fastserve_scheduler import app
from fastserve_scheduler.settings import SchedulerSettings

from .stages import StageRig

PATIENCE_S = 30.0

Message = scheduler_pb2.GatewayMessage


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition; TimeoutError when it does not come."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - anything may make it true
            await asyncio.sleep(0.002)


async def until_async(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await condition():  # noqa: ASYNC110 - anything may make it true
            await asyncio.sleep(0.01)


class Answer:
    """What one request got so far. Tokens must come without gaps and without repetition."""

    def __init__(self, delivered: Sequence[int] = ()) -> None:
        self.ids: list[int] = list(delivered)
        self.logprobs: list[sampling_pb2.TokenLogprobs] = []
        self.finished: scheduler_pb2.Finished | None = None
        self.rejected: scheduler_pb2.Rejected | None = None
        self.over = asyncio.Event()

    def take(self, tokens: scheduler_pb2.Tokens) -> None:
        assert self.finished is None, "tokens after the end"
        assert tokens.offset == len(self.ids), f"offset {tokens.offset} after {len(self.ids)} tokens"
        self.ids += array("I", tokens.token_ids)
        self.logprobs += tokens.logprobs

    async def done(self) -> Self:
        await asyncio.wait_for(self.over.wait(), PATIENCE_S)
        return self

    @property
    def reason(self) -> str:
        assert self.finished is not None, f"rejected: {self.rejected}"
        assert self.finished.output_tokens == len(self.ids)
        return scheduler_pb2.StopReason.Name(self.finished.reason).removeprefix("STOP_REASON_")

    @property
    def refusal(self) -> str:
        assert self.rejected is not None, "not rejected"
        return scheduler_pb2.RejectReason.Name(self.rejected.reason).removeprefix("REJECT_REASON_")


class TestGateway:
    """One Connect stream."""

    __test__ = False
    _numbers = itertools.count()

    def __init__(self, address: str, gateway_id: str, *, batches: bool) -> None:
        self.gateway_id, self._batches = gateway_id, batches
        self.answers: dict[str, Answer] = {}
        self.hellos: list[scheduler_pb2.SchedulerHello] = []
        self.statuses: list[scheduler_pb2.ClusterStatus] = []
        self.loads: list[scheduler_pb2.Load] = []
        self.problem: BaseException | None = None
        self._channel = open_channel(address)
        self._call = scheduler_pb2_grpc.SchedulerStub(self._channel).Connect()
        self._reader: asyncio.Task[None] | None = None

    async def open(self) -> None:
        hello = scheduler_pb2.GatewayHello(gateway_id=self.gateway_id, accepts_batches=self._batches)
        await self._call.write(Message(hello=hello))
        self._reader = asyncio.create_task(self._read())
        await until(lambda: bool(self.statuses))
        assert self.hellos, "the hello comes first"

    @property
    def closed(self) -> bool:
        return self._reader is not None and self._reader.done()

    async def _read(self) -> None:
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                self._take(cast(scheduler_pb2.SchedulerMessage, message))
        except grpc.aio.AioRpcError:
            pass  # the scheduler is gone
        except AssertionError as error:
            self.problem = error
            for answer in self.answers.values():
                answer.over.set()

    def _take(self, message: scheduler_pb2.SchedulerMessage) -> None:
        match message.WhichOneof("message"):
            case "batch":
                assert self._batches, "not asked for"
                assert len(message.batch.messages) > 1
                for part in message.batch.messages:
                    assert part.WhichOneof("message") in ("tokens", "finished", "rejected")
                    self._take(part)
            case "hello":
                self.hellos.append(message.hello)
            case "load":
                self.loads.append(message.load)
            case "status":
                self.statuses.append(message.status)
            case "tokens":
                self.answers[message.tokens.request_id].take(message.tokens)
            case "finished":
                answer = self.answers[message.finished.request_id]
                answer.finished = message.finished
                answer.over.set()
            case "rejected":
                answer = self.answers[message.rejected.request_id]
                answer.rejected = message.rejected
                answer.over.set()

    async def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        request_id: str = "",
        delivered: Sequence[int] = (),
        stop: Sequence[int] = (),
        min_tokens: int = 0,
        sampling: sampling_pb2.SamplingParams | None = None,
        priority: int = 0,
    ) -> Answer:
        request_id = request_id or f"request-{next(self._numbers)}"
        answer = self.answers[request_id] = Answer(delivered)
        submit = scheduler_pb2.SubmitRequest(
            request_id=request_id,
            prompt_token_ids=array("I", prompt).tobytes(),
            delivered_token_ids=array("I", delivered).tobytes(),
            sampling=sampling,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_token_ids=stop,
            priority=priority,
        )
        await self._call.write(Message(submit=submit))
        return answer

    async def ask(self, prompt: Sequence[int], max_tokens: int, **options: object) -> Answer:
        answer = await (await self.submit(prompt, max_tokens, **options)).done()  # type: ignore[arg-type]  # passed on
        if self.problem is not None:
            raise self.problem
        return answer

    async def cancel(
        self, request_id: str, reason: scheduler_pb2.CancelReason.ValueType = scheduler_pb2.CANCEL_REASON_CLIENT
    ) -> None:
        await self._call.write(Message(cancel=scheduler_pb2.CancelRequest(request_id=request_id, reason=reason)))

    async def close(self) -> None:
        """The stream breaks."""
        self._call.cancel()
        await self._channel.close()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        if self.problem is not None:
            raise self.problem


class SchedulerProcess:
    """`app.run` as a task."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.stop = asyncio.Event()
        self.task = asyncio.create_task(app.run(settings, self.stop))

    async def end(self) -> int:
        self.stop.set()
        return await asyncio.wait_for(self.task, PATIENCE_S)

    async def crash(self) -> None:
        """As good as kill -9: nothing is drained. (Its lease is given up, so that tests need not wait for expiry.)"""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


class Cluster:
    """`async with Cluster(tmp_path, ...) as cluster`: ready to serve; on exit the ledger must be clean."""

    __test__ = False

    def __init__(
        self,
        folder: Path,
        num_stages: int = 1,
        *,
        flags: Sequence[str] = (),
        state: str = "",
        group: str = DEFAULT_GROUP,
        **shape: int,
    ) -> None:
        """`state`: URL of the state store; empty: a file in `folder`."""
        self.url = state or f"sqlite://{folder / 'state.db'}"
        self.store: StateStore = open_state(self.url)
        self.leader = in_group("leader", group)
        self.rig = StageRig(self.store, num_stages, group=group, **shape)
        self.flags = [
            *("--state", self.url, "--num-stages", str(num_stages), "--profile-dir", str(folder / "profiles")),
            *("--check", "--drain-timeout", "5", "--group", group, *flags),
        ]
        self.schedulers: list[SchedulerProcess] = []
        self.gateways: list[TestGateway] = []
        self.address = ""

    def settings(self, *flags: str) -> SchedulerSettings:
        return SchedulerSettings.load([*self.flags, *flags], prog="test")

    async def __aenter__(self) -> Self:
        await self.rig.start_all()
        await self.start_scheduler()
        return self

    async def start_scheduler(self, *flags: str) -> SchedulerProcess:
        scheduler = SchedulerProcess(self.settings(*flags))
        self.schedulers.append(scheduler)
        await self.find_scheduler(scheduler)
        return scheduler

    async def find_scheduler(self, scheduler: SchedulerProcess) -> None:
        known = self.address

        async def found() -> bool:
            if scheduler.task.done():
                scheduler.task.result()
            members = await self.store.members("scheduler")
            self.address = members.get(self.leader, {}).get("address", known)
            return self.address != known

        await until_async(found)

    async def gateway(self, gateway_id: str = "gw", *, ready: bool = True, batches: bool = True) -> TestGateway:
        gateway = TestGateway(self.address, gateway_id, batches=batches)
        self.gateways.append(gateway)
        await gateway.open()
        if ready:
            await until(lambda: gateway.statuses[-1].ready)
        return gateway

    async def state(self) -> scheduler_pb2.GetStateResponse:
        async with open_channel(self.address) as channel:
            return await scheduler_pb2_grpc.SchedulerStub(channel).GetState(scheduler_pb2.GetStateRequest())

    def has_accepted(self, num_jobs: int) -> Callable[[], Awaitable[bool]]:
        """Whether the scheduler knows of `num_jobs` jobs: a `submit` that returned is only on its way."""

        async def accepted() -> bool:
            state = await self.state()
            return state.running + state.waiting >= num_jobs

        return accepted

    async def stop_stages(self) -> None:
        """They say goodbye to the state store, so it must still be open."""
        await self.rig.close()

    async def ledger_is_clean(self) -> bool:
        state = await self.state()
        return (
            state.running == state.waiting == state.batches_in_flight == 0
            and state.device_blocks_free == state.device_blocks_total
        )

    async def __aexit__(self, *exc_info: object) -> None:
        async with contextlib.AsyncExitStack() as exits:
            exits.push_async_callback(self.store.close)
            exits.push_async_callback(self.stop_stages)
            for scheduler in self.schedulers:
                if not scheduler.task.done():
                    exits.push_async_callback(scheduler.end)
            for gateway in self.gateways:
                exits.push_async_callback(gateway.close)
            if exc_info[0] is None and not self.schedulers[-1].task.done():
                await until_async(self.ledger_is_clean)
