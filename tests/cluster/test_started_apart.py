"""A pipeline whose processes were started apart: every kind of batch, a stage that falls silent, SIGTERM under load."""

import asyncio
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from fastserve import AsyncClient, RetryPolicy
from fastserve.cli import specs
from fastserve.cli.settings import ServeSettings
from fastserve.v1 import scheduler_pb2, scheduler_pb2_grpc
from fastserve_common.channels import open_channel
from fastserve_common.state import open_state
from fastserve_scheduler.desk import GOING_AWAY
from fastserve_worker.fake_stage import fake_answer

from .processes import Processes
from .system import PATIENCE_S
from .words import FAKE_VOCAB_SIZE

pytestmark = pytest.mark.cluster

PROMPTS = [[50 + n, 51, 52] for n in range(4)]
MAX_TOKENS = 30
NUM_STAGES = 4
#: Twenty chunks, of which the last one alone draws a token.
LONG_PROMPT = [n % 50 for n in range(640)]
#: Long enough for any machine, and not to be waited for.
NEVER_S = 600


class Pipeline(Processes):
    """Gateway, scheduler and four fake stages, and what may be asked of them."""

    def __init__(self, folder: Path, words: Path, profiles: Path) -> None:
        super().__init__(folder)
        self._settings = ServeSettings(
            model=str(words),
            fake=True,
            stages=NUM_STAGES,
            fake_iteration_ms=5,
            max_num_batched_tokens=64,
            prefill_chunk_tokens=32,
            host_kv_memory=0,
            kv_memory=64 << 20,
            profile_dir=profiles,
            served_model_name=("words",),
            drain_timeout=NEVER_S,
        )
        self._url = f"sqlite://{folder}/state.db"
        self._model = specs.Model(words, "words", FAKE_VOCAB_SIZE)

    def start_all(self) -> None:
        self.stages = [self.start_stage(stage) for stage in range(NUM_STAGES)]
        self.scheduler = self.start_scheduler()
        self.gateway = self.start_gateway()

    def start_stage(self, stage: int) -> "subprocess.Popen[bytes]":
        return self.start(specs.workers(self._settings, self._url, self._model)[stage])

    def start_scheduler(self, *flags: str) -> "subprocess.Popen[bytes]":
        return self.start(specs.scheduler(self._settings, self._url, self._model), *flags)

    def start_gateway(self) -> "subprocess.Popen[bytes]":
        return self.start(specs.gateway(self._settings, self._url, self._model, port=0, grpc_port=0))

    async def member(self, role: str) -> dict[str, str]:
        """What the only one of a role says of itself, when there is one."""
        store = open_state(self._url)
        try:
            while True:
                members = await store.members(role)
                if len(members) == 1:
                    return next(iter(members.values()))
                await asyncio.sleep(0.02)
        finally:
            await store.close()

    async def state(self) -> scheduler_pb2.GetStateResponse:
        async with open_channel((await self.member("scheduler"))["address"]) as channel:
            return await scheduler_pb2_grpc.SchedulerStub(channel).GetState(scheduler_pb2.GetStateRequest())

    async def has_taken_all(self) -> bool:
        state = await self.state()
        return state.running + state.waiting == len(PROMPTS)

    async def clean(self) -> bool:
        """Nothing is left of any request."""
        state = await self.state()
        nothing = not (state.running or state.waiting or state.swapped or state.batches_in_flight)
        return nothing and state.device_blocks_free == state.device_blocks_total

    @asynccontextmanager
    async def connected(self) -> AsyncIterator["Caller"]:
        info = await self.member("gateway")
        async with (
            AsyncClient(info["grpc"], retry=RetryPolicy(max_attempts=1), timeout_s=PATIENCE_S) as client,
            httpx.AsyncClient(base_url=f"http://{info['http']}", timeout=PATIENCE_S) as http,
        ):
            caller = Caller(client, http)
            await caller.until_ready(200)
            yield caller


class Caller:
    def __init__(self, client: AsyncClient, http: httpx.AsyncClient) -> None:
        self._client, self._http = client, http
        self.ids: list[list[int]] = [[] for _ in PROMPTS]

    async def until_ready(self, status: int, why: str = "") -> None:
        async def said() -> bool:
            answer = await self._http.get("/health/ready")
            return answer.status_code == status and why in answer.text

        await until(said)

    async def ask(self, prompt: list[int], max_tokens: int) -> None:
        answer = await self._client.generate(prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        assert list(answer.answers[0].token_ids) == fake_answer(prompt, max_tokens)

    def begin(self) -> list["asyncio.Task[None]"]:
        """One answer per prompt."""
        self.ids = [[] for _ in PROMPTS]
        return [asyncio.create_task(self._read(index)) for index in range(len(PROMPTS))]

    async def _read(self, index: int) -> None:
        async with self._client.stream(
            PROMPTS[index], max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True
        ) as stream:
            async for chunk in stream:
                self.ids[index] += chunk.token_ids

    async def under_way(self) -> None:
        async def all_began() -> bool:
            return all(self.ids)

        await until(all_began)

    async def refused(self) -> None:
        """A new request, while the others go on."""
        answer = await self._http.post("/v1/completions", json={"model": "words", "prompt": PROMPTS[0]})
        assert (answer.status_code, "retry-after" in answer.headers) == (503, True), answer.text

    async def whole(self, answers: list["asyncio.Task[None]"]) -> None:
        """Every token came, once."""
        await asyncio.gather(*answers)
        assert self.ids == [fake_answer(prompt, MAX_TOKENS) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory, words: Path, profiles: Path) -> Iterator[Pipeline]:
    """One for the module: each test leaves it as whole as it found it."""
    pipeline = Pipeline(tmp_path_factory.mktemp("pipeline"), words, profiles)
    try:
        pipeline.start_all()
        yield pipeline
    finally:
        pipeline.destroy()


@pytest.fixture
async def caller(pipeline: Pipeline) -> AsyncIterator[Caller]:
    try:
        async with asyncio.timeout(PATIENCE_S), pipeline.connected() as caller:
            yield caller
            await caller.until_ready(200)
            await caller.ask([7, 8], 4)
            await until(pipeline.clean)
    except TimeoutError:
        raise AssertionError(pipeline.said()) from None


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    while True:
        if await condition():
            return
        await asyncio.sleep(0.01)


async def ended(process: "subprocess.Popen[bytes]") -> int:
    return await asyncio.to_thread(process.wait, PATIENCE_S)


def freeze(process: "subprocess.Popen[bytes]") -> Callable[[], None]:
    process.send_signal(signal.SIGSTOP)
    return lambda: process.send_signal(signal.SIGCONT)


@asynccontextmanager
async def held(pipeline: Pipeline, caller: Caller) -> AsyncIterator[list["asyncio.Task[None]"]]:
    """Answers that are in flight and stay so: inside, the first stage is frozen."""
    thaw = freeze(pipeline.stages[0])
    try:
        answers = caller.begin()
        await until(pipeline.has_taken_all)
        yield answers
    finally:
        thaw()


async def test_every_kind_of_batch_gets_through(caller: Caller) -> None:
    """Inner chunks alone, one token in and out, nothing but answers that nobody wants any more."""
    await caller.ask(LONG_PROMPT, 3)
    await caller.ask([7], 1)
    cut_off = caller.begin()
    await caller.under_way()
    for task in cut_off:
        task.cancel()
    await asyncio.gather(*cut_off, return_exceptions=True)
    await caller.ask([8, 9], 4)


async def test_a_stage_that_falls_silent_is_named_and_its_return_costs_no_token(
    pipeline: Pipeline, caller: Caller
) -> None:
    answers = caller.begin()
    await caller.under_way()
    thaw = freeze(pipeline.stages[2])
    await caller.until_ready(503, "stage 2")
    thaw()
    await caller.whole(answers)


async def test_a_stage_leaves_at_once_and_its_successor_costs_no_token(pipeline: Pipeline, caller: Caller) -> None:
    answers = caller.begin()
    await caller.under_way()
    pipeline.stages[1].terminate()
    assert await ended(pipeline.stages[1]) == 0
    await caller.until_ready(503, "stage 1")
    pipeline.stages[1] = pipeline.start_stage(1)
    await caller.whole(answers)


async def test_a_scheduler_finishes_what_it_can_in_time_and_leaves_the_rest_to_the_next(
    pipeline: Pipeline, caller: Caller
) -> None:
    async with held(pipeline, caller) as answers:
        pipeline.scheduler.terminate()
        await caller.until_ready(503, GOING_AWAY)
        await caller.refused()
    await caller.whole(answers)
    assert await ended(pipeline.scheduler) == 0

    pipeline.scheduler = pipeline.start_scheduler("--drain-timeout=0.2")
    await caller.until_ready(200)
    answers = caller.begin()
    await caller.under_way()
    thaw = freeze(pipeline.stages[0])
    pipeline.scheduler.terminate()
    assert await ended(pipeline.scheduler) == 0, "a frozen stage cannot hold the end"
    thaw()
    pipeline.scheduler = pipeline.start_scheduler()
    await caller.whole(answers)
