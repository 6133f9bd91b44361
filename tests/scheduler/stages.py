"""Scripted pipeline stages: real Control streams, a token rule that shows every mistake, and hooks to do harm.

Each stage keeps ids by (block, offset). The token is a hash of the ids that the stages *read back* through the block
table, so a block given to two jobs, a span planned twice or left out, or an id in the wrong place is a wrong token.
Plans go from stage to stage inside this process; the scheduler is reached over gRPC only.
"""

import asyncio
import contextlib
import hashlib
import uuid
from array import array
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass, field

import grpc
import grpc.aio

from fastserve.v1 import stage_pb2, stage_pb2_grpc
from fastserve_common.channels import server_options
from fastserve_common.state import DEFAULT_GROUP, StateStore, membership, stage_member

VOCAB_SIZE = 997
FINGERPRINT = "scripted"


def draw(context: Sequence[int], seed: int, position: int, suppressed: Collection[int]) -> int:
    digest = hashlib.blake2b(array("I", context).tobytes() + f"/{seed}/{position}".encode(), digest_size=8).digest()
    token_id = int.from_bytes(digest, "little") % VOCAB_SIZE
    while token_id in suppressed:
        token_id = (token_id + 1) % VOCAB_SIZE
    return token_id


def oracle(
    prompt: Sequence[int], num_tokens: int, *, seed: int = 0, suppressed: Collection[int] = (), min_tokens: int = 0
) -> list[int]:
    """What the request gets when it is alone in the world."""
    context = list(prompt)
    for position in range(num_tokens):
        context.append(draw(context, seed, position, suppressed if position < min_tokens else ()))
    return context[len(prompt) :]


def _u32(data: bytes) -> list[int]:
    return list(array("I", data))


@dataclass
class Script:
    """What a stage does apart from its work. Shared by the lives of one stage."""

    #: Set: plans are computed. Cleared: they wait.
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    #: A message makes the plan a fault.
    fault: Callable[[stage_pb2.IterationPlan], str | None] = lambda plan: None
    #: Ends the stage's stream without a word when true.
    crash: Callable[[stage_pb2.IterationPlan], bool] = lambda plan: False
    #: Has the last word on a report.
    mangle: Callable[[stage_pb2.IterationReport], None] = lambda report: None
    #: Every report is sent this many times.
    copies: int = 1
    #: After Configure, reports of earlier epochs are sent again.
    haunted: bool = False
    #: Configure is answered.
    answers: bool = True
    #: Plans seen, of all epochs.
    plans: list[stage_pb2.IterationPlan] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gate.set()


@dataclass
class _Work:
    plan: stage_pb2.IterationPlan
    compute_ns: int = 0
    #: Per item, what the stages so far read; None: they disagree.
    contexts: list[list[int] | None] = field(default_factory=list)


class ScriptedStage(stage_pb2_grpc.StageServicer):
    """One life of one stage."""

    def __init__(
        self, stage: int, num_stages: int, script: Script, *, num_blocks: int, block_size: int, max_model_len: int
    ) -> None:
        self.stage, self.num_stages, self.script = stage, num_stages, script
        self.next: ScriptedStage | None = None
        self.fingerprint = FINGERPRINT
        self._num_blocks, self._block_size, self._max_model_len = num_blocks, block_size, max_model_len
        self._pool: dict[tuple[int, int], int] = {}
        self._epoch = 0
        self._work: asyncio.Queue[_Work] = asyncio.Queue()
        self._out: asyncio.Queue[stage_pb2.StageMessage | None] = asyncio.Queue()
        self._said: list[stage_pb2.StageMessage] = []
        self._worker = asyncio.create_task(self._run())

    def kill(self) -> None:
        self._worker.cancel()
        self._out.put_nowait(None)

    async def Control(self, request_iterator, context):  # type: ignore[no-untyped-def]  # of the generated class
        self._out = asyncio.Queue()
        reader = asyncio.create_task(self._read(request_iterator))
        try:
            while (message := await self._out.get()) is not None:
                yield message
            await context.abort(grpc.StatusCode.UNAVAILABLE, "killed")
        finally:
            reader.cancel()

    async def Forward(self, request_iterator, context):  # type: ignore[no-untyped-def]  # of the generated class
        """Scripted stages hand plans on inside the process."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "scripted")
        yield

    async def _read(self, messages: AsyncIterator[stage_pb2.ControlMessage]) -> None:
        async for message in messages:
            match message.WhichOneof("message"):
                case "configure":
                    self._configure(message.configure)
                case "plan":
                    self._work.put_nowait(_Work(message.plan))
                case "profile":
                    self._profile(message.profile)

    def _configure(self, configure: stage_pb2.Configure) -> None:
        assert configure.epoch > self._epoch, "epochs rise"
        self._epoch = configure.epoch
        self._pool.clear()
        if not self.script.answers:
            return
        ready = stage_pb2.StageReady(
            epoch=self._epoch,
            stage=self.stage,
            num_stages=self.num_stages,
            num_blocks=self._num_blocks,
            block_size=self._block_size,
            max_model_len=self._max_model_len,
            vocab_size=VOCAB_SIZE,
            model_fingerprint=self.fingerprint,
            kv_block_bytes=1024,
            device="cpu",
            dtype="float32",
        )
        self._out.put_nowait(stage_pb2.StageMessage(ready=ready))
        if self.script.haunted:
            for message in self._said:
                self._out.put_nowait(message)

    def _profile(self, order: stage_pb2.ProfileOrder) -> None:
        times = [1_000_000 + 10_000 * p.new_tokens * p.num_sequences + p.context_tokens for p in order.points]
        report = stage_pb2.ProfileReport(profile_id=order.profile_id, stage=self.stage, compute_ns=times)
        self._out.put_nowait(stage_pb2.StageMessage(profile=report))

    async def _run(self) -> None:
        while True:
            work = await self._work.get()
            if self.stage == 0:
                self.script.plans.append(work.plan)
            await self.script.gate.wait()
            if work.plan.epoch != self._epoch:
                continue
            if self.script.crash(work.plan):
                self._out.put_nowait(None)
                continue
            if (why := self.script.fault(work.plan)) is not None:
                fault = stage_pb2.StageFault(seq=work.plan.seq, epoch=work.plan.epoch, message=why)
                self._out.put_nowait(stage_pb2.StageMessage(fault=fault))
                continue
            self._compute(work)

    def _compute(self, work: _Work) -> None:
        contexts: list[list[int] | None] = [self._read_back(item) for item in work.plan.items]
        if work.contexts:
            contexts = [c if c == before else None for c, before in zip(contexts, work.contexts, strict=True)]
        work.contexts = contexts
        work.compute_ns += 1_000_000
        report = stage_pb2.IterationReport(
            seq=work.plan.seq, epoch=work.plan.epoch, stage=self.stage, compute_ns=1_000_000
        )
        if self.next is None:
            self._finish(work, report)
        else:
            self.next._work.put_nowait(work)
        self.script.mangle(report)
        message = stage_pb2.StageMessage(iteration=report)
        self._said.append(message)
        for _ in range(self.script.copies):
            self._out.put_nowait(message)

    def _read_back(self, item: stage_pb2.PlanItem) -> list[int]:
        table, size = _u32(item.block_table), self._block_size
        ids = _u32(item.token_ids)
        assert len(ids) == item.num_tokens, "one id per token"
        for position, token_id in enumerate(ids, item.start):
            self._pool[table[position // size], position % size] = token_id
        # An id that is not there reads as one that cannot be.
        end = item.start + item.num_tokens
        return [self._pool.get((table[p // size], p % size), VOCAB_SIZE) for p in range(end)]

    def _finish(self, work: _Work, report: stage_pb2.IterationReport) -> None:
        tokens = array("I")
        wants_logprobs = any(item.sampling.HasField("logprobs") for item in work.plan.items)
        for item, context in zip(work.plan.items, work.contexts, strict=True):
            if not item.sample:
                continue
            tokens.append(_draw_item(item, context))
            if wants_logprobs:
                entry = report.logprobs.add()
                if item.sampling.HasField("logprobs"):
                    entry.token_id, entry.logprob = tokens[-1], -0.25
        report.token_ids = tokens.tobytes()
        report.total_compute_ns = work.compute_ns


def _draw_item(item: stage_pb2.PlanItem, context: list[int] | None) -> int:
    if context is None:
        return VOCAB_SIZE - 1  # the stages disagree: nothing that an oracle says at every position
    history = _u32(item.penalty_prompt_ids) + _u32(item.penalty_output_ids)
    wants_history = item.sampling.presence_penalty != 0
    if history != (context if wants_history else []):
        return VOCAB_SIZE - 1
    return draw(context, item.sampling.seed, item.output_position, _u32(item.suppressed_token_ids))


class StageRig:
    """All stages of a pipeline, each of which can be killed and brought back."""

    def __init__(
        self,
        store: StateStore,
        num_stages: int = 1,
        *,
        num_blocks: int = 256,
        block_size: int = 4,
        max_model_len: int = 512,
        replica: int = 0,
        group: str = DEFAULT_GROUP,
    ) -> None:
        self.replica, self.group = replica, group
        self.store, self.num_stages = store, num_stages
        self.scripts = [Script() for _ in range(num_stages)]
        self.stages: list[ScriptedStage | None] = [None] * num_stages
        self._shape = {"num_blocks": num_blocks, "block_size": block_size, "max_model_len": max_model_len}
        self._exits: list[contextlib.AsyncExitStack] = [contextlib.AsyncExitStack() for _ in range(num_stages)]

    async def start(self, stage: int, *, fingerprint: str = FINGERPRINT, num_blocks: int | None = None) -> None:
        shape = dict(self._shape)
        if num_blocks is not None:
            shape["num_blocks"] = num_blocks
        servicer = ScriptedStage(stage, self.num_stages, self.scripts[stage], **shape)
        servicer.fingerprint = fingerprint
        self.stages[stage] = servicer
        for before, after in zip(self.stages, self.stages[1:], strict=False):
            if before is not None:
                before.next = after
        server = grpc.aio.server(options=server_options())
        stage_pb2_grpc.add_StageServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        info = {"address": f"127.0.0.1:{port}", "incarnation": uuid.uuid4().hex}
        exits = self._exits[stage]
        exits.push_async_callback(server.stop, None)
        exits.callback(servicer.kill)
        name = stage_member(self.replica, stage, self.group)
        await exits.enter_async_context(membership(self.store, "stage", name, info))

    async def start_all(self) -> None:
        for stage in range(self.num_stages):
            await self.start(stage)

    async def kill(self, stage: int) -> None:
        """Its stream breaks, its memory is gone."""
        await self._exits[stage].aclose()
        self.stages[stage] = None

    async def close(self) -> None:
        for script in self.scripts:
            script.gate.set()
        for stage in range(self.num_stages):
            await self.kill(stage)
