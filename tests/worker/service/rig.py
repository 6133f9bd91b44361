"""The scheduler's side of the stage wire, as small as it can be: makes plans, carries them out, keeps the answers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

from fastserve.v1 import sampling_pb2, stage_pb2, stage_pb2_grpc
from fastserve_common.channels import open_channel
from fastserve_common.packed import pack_u32, unpack_u32
from fastserve_worker.backend import StageBackend
from fastserve_worker.service import serve_in_process

BLOCK_SIZE = 16
ANSWER_TIMEOUT_S = 30.0

Sampling = sampling_pb2.SamplingParams


@dataclass
class Job:
    """One request: what is known of it and how far its KV goes."""

    job_id: int
    prompt: list[int]
    table: list[int]
    sampling: Sampling | None = None
    suppressed: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    logprobs: list[sampling_pb2.TokenLogprobs] = field(default_factory=list)
    computed: int = 0

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.output

    def item(self, max_tokens: int | None = None) -> stage_pb2.PlanItem:
        """The next piece of this job: what has no KV yet, at most `max_tokens` of it."""
        end = len(self.ids) if max_tokens is None else min(len(self.ids), self.computed + max_tokens)
        item = stage_pb2.PlanItem(
            job_id=self.job_id,
            start=self.computed,
            num_tokens=end - self.computed,
            block_table=pack_u32(self.table),
            token_ids=pack_u32(self.ids[self.computed : end]),
            sample=end == len(self.ids),
            output_position=len(self.output),
            suppressed_token_ids=pack_u32(self.suppressed),
        )
        if self.sampling is not None and item.sample:
            item.sampling.CopyFrom(self.sampling)
            if self.sampling.presence_penalty or self.sampling.frequency_penalty or self.sampling.repetition_penalty:
                item.penalty_prompt_ids = pack_u32(self.prompt)
                item.penalty_output_ids = pack_u32(self.output)
        return item


class StageClient:
    """A Control stream to one stage, and what came back on it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = open_channel(address)
        self.call = stage_pb2_grpc.StageStub(self._channel).Control()
        self._inbox: asyncio.Queue[stage_pb2.StageMessage | BaseException] = asyncio.Queue()
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for message in self.call:
                self._inbox.put_nowait(message)
            self._inbox.put_nowait(EOFError())
        except Exception as error:
            self._inbox.put_nowait(error)

    async def configure(self, epoch: int, next_address: str = "") -> stage_pb2.StageReady:
        """What an earlier epoch still had to say is passed over."""
        await self.send_configure(epoch, next_address)
        while (message := await self.answer()).WhichOneof("message") != "ready":
            pass
        return message.ready

    async def send_configure(self, epoch: int, next_address: str = "") -> None:
        order = stage_pb2.Configure(epoch=epoch, next_stage_address=next_address)
        await self.call.write(stage_pb2.ControlMessage(configure=order))

    async def send_plan(self, plan: stage_pb2.IterationPlan) -> None:
        await self.call.write(stage_pb2.ControlMessage(plan=plan))

    async def answer(self, kind: str | None = None) -> stage_pb2.StageMessage:
        """The next message, which must be of `kind`. Raises what ended the stream."""
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            message = await self._inbox.get()
        if isinstance(message, BaseException):
            raise message
        assert kind is None or message.WhichOneof("message") == kind, message
        return message

    async def fault(self) -> stage_pb2.StageFault:
        """The next fault; reports of plans that still went well are passed over."""
        while (message := await self.answer()).WhichOneof("message") != "fault":
            assert message.WhichOneof("message") == "iteration", message
        return message.fault

    async def aclose(self) -> None:
        self.call.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._channel.close()


class Pipeline:
    """A scheduler without a policy, in charge of running stages."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.addresses = list(addresses)
        self.clients = [StageClient(address) for address in addresses]
        self.epoch = 0
        self.seq = 0
        self._next_block = 0

    async def __aenter__(self) -> Self:
        await self.raise_epoch()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await asyncio.gather(*(client.aclose() for client in self.clients))

    @property
    def first(self) -> StageClient:
        return self.clients[0]

    @property
    def last(self) -> StageClient:
        return self.clients[-1]

    async def raise_epoch(self) -> list[stage_pb2.StageReady]:
        self.epoch += 1
        self._next_block = 0
        return await asyncio.gather(
            *(client.configure(self.epoch, self._next_address(i)) for i, client in enumerate(self.clients))
        )

    def _next_address(self, stage: int) -> str:
        return self.addresses[stage + 1] if stage + 1 < len(self.addresses) else ""

    async def reconnect(self, stage: int, address: str) -> None:
        """Another process took this stage's place."""
        await self.clients[stage].aclose()
        self.addresses[stage] = address
        self.clients[stage] = StageClient(address)

    def job(
        self,
        prompt: Sequence[int],
        num_output: int,
        sampling: Sampling | None = None,
        suppressed: Sequence[int] = (),
    ) -> Job:
        """A job with blocks for all its tokens, not in rising order."""
        num_blocks = -(-(len(prompt) + num_output) // BLOCK_SIZE)
        table = list(range(self._next_block, self._next_block + num_blocks))[::-1]
        self._next_block += num_blocks
        return Job(table[0], list(prompt), table, sampling, list(suppressed))

    def plan(self, items: Sequence[stage_pb2.PlanItem]) -> stage_pb2.IterationPlan:
        self.seq += 1
        return stage_pb2.IterationPlan(seq=self.seq, epoch=self.epoch, items=items)

    async def run(self, items: Sequence[stage_pb2.PlanItem]) -> stage_pb2.IterationReport:
        """One iteration: every stage must report it. Gives the last stage's report."""
        plan = self.plan(items)
        await self.first.send_plan(plan)
        reports = [(await client.answer("iteration")).iteration for client in self.clients]
        assert [(r.seq, r.epoch, r.stage) for r in reports] == [
            (plan.seq, plan.epoch, stage) for stage in range(len(self.clients))
        ]
        assert reports[-1].total_compute_ns == sum(report.compute_ns for report in reports)
        return reports[-1]

    async def step(self, jobs: Sequence[Job], max_tokens: int | None = None) -> None:
        """Take each job one iteration further."""
        items = [job.item(max_tokens) for job in jobs]
        report = await self.run(items)
        apply(jobs, items, report)

    async def generate(self, jobs: Sequence[Job], num_output: int, max_tokens: int | None = None) -> list[list[int]]:
        """Until each job has `num_output` tokens; a prompt goes in pieces of at most `max_tokens`."""
        while live := [job for job in jobs if len(job.output) < num_output]:
            await self.step(live, max_tokens)
        return [job.output for job in jobs]


def apply(jobs: Sequence[Job], items: Sequence[stage_pb2.PlanItem], report: stage_pb2.IterationReport) -> None:
    """Note what an iteration gave."""
    token_ids = iter(unpack_u32(report.token_ids))
    logprobs = iter(report.logprobs)
    for job, item in zip(jobs, items, strict=True):
        job.computed += item.num_tokens
        if item.sample:
            job.output.append(next(token_ids))
            job.logprobs.extend([next(logprobs)] if report.logprobs else [])
    assert next(token_ids, None) is None
    assert next(logprobs, None) is None


@contextlib.asynccontextmanager
async def pipeline_of(make_stage: Callable[[int, int], StageBackend], num_stages: int) -> AsyncIterator[Pipeline]:
    """Serve stages on loopback ports and take charge of them. `make_stage(stage, num_stages)`."""
    async with contextlib.AsyncExitStack() as stack:
        backends = [make_stage(stage, num_stages) for stage in range(num_stages)]
        addresses = [(await stack.enter_async_context(serve_in_process(backend)))[1] for backend in backends]
        yield await stack.enter_async_context(Pipeline(addresses))
