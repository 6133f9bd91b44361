"""Two groups of real processes on a real Redis behind one gateway: both serve, and one is killed."""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from fastserve import AsyncClient, RetryPolicy
from fastserve.cli import specs
from fastserve.cli.find import scheduler_addresses
from fastserve.cli.settings import ServeSettings
from fastserve.cli.top import sample
from fastserve_common.state import open_state
from fastserve_worker.fake_stage import fake_answer

from .redis_cluster import PATIENCE_S
from .words import FAKE_VOCAB_SIZE

pytestmark = pytest.mark.cluster

GROUPS = ("default", "b")
NUM_STREAMS, MAX_TOKENS = 8, 40


class Processes:
    """A gateway; for each group a scheduler and its one stage."""

    def __init__(self, folder: Path, words: Path, profiles: Path, state_url: str) -> None:
        self.state_url, self._logs = state_url, folder
        self._all: list[subprocess.Popen[bytes]] = []
        self._settings = ServeSettings(
            model=str(words),
            fake=True,
            fake_iteration_ms=20,
            stages=1,
            host_kv_memory=0,
            kv_memory=64 << 20,
            profile_dir=profiles,
            served_model_name=("words",),
        )
        self._model = specs.Model(words, "words", FAKE_VOCAB_SIZE)
        self.schedulers: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        (stage,) = specs.workers(self._settings, self.state_url, self._model)
        for group in GROUPS:
            self._start(stage, f"--group={group}")
            self.start_scheduler(group)
        self._start(specs.gateway(self._settings, self.state_url, self._model, port=0, grpc_port=0))

    def start_scheduler(self, group: str) -> None:
        spec = specs.scheduler(self._settings, self.state_url, self._model)
        self.schedulers[group] = self._start(spec, f"--group={group}")

    def _start(self, spec: specs.ChildSpec, *flags: str) -> subprocess.Popen[bytes]:
        environment = specs.child_environment(spec.environment, os.environ)
        with (self._logs / f"{spec.name}{''.join(flags)}.log").open("ab") as output:
            process = subprocess.Popen([*spec.argv, *flags], stdout=output, stderr=output, env=environment)
        self._all.append(process)
        return process

    def said(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(self._logs.glob("*.log")))

    def end(self) -> None:
        for process in self._all:
            process.kill()
            process.wait()


@pytest.fixture
def processes(tmp_path: Path, words: Path, profiles: Path, redis_url: str) -> Iterator[Processes]:
    processes = Processes(tmp_path, words, profiles, redis_url)
    try:
        processes.start()
        yield processes
    finally:
        processes.end()


@contextlib.asynccontextmanager
async def client_of(state_url: str) -> AsyncIterator[AsyncClient]:
    """When the gateway serves."""
    store = open_state(state_url)
    while not (members := await store.members("gateway")):  # noqa: ASYNC110 - the store tells nobody
        await asyncio.sleep(0.02)
    await store.close()
    (info,) = members.values()
    async with AsyncClient(info["grpc"], retry=RetryPolicy(max_attempts=20)) as client:
        yield client


async def tokens_generated(state_url: str) -> dict[str, int]:
    addresses = await scheduler_addresses(state_url)
    return {group: (await sample(address)).state.tokens_generated for group, address in addresses.items()}


async def both_serve(state_url: str) -> None:
    while True:
        addresses = await scheduler_addresses(state_url)
        if sorted(addresses) == sorted(GROUPS):
            states = [(await sample(address)).state for address in addresses.values()]
            if all(stage.up for state in states for stage in state.stages):
                return
        await asyncio.sleep(0.02)


async def test_requests_are_spread_and_go_on_without_one_group(processes: Processes) -> None:
    try:
        async with asyncio.timeout(PATIENCE_S):
            await through_it_all(processes)
    except TimeoutError:
        raise AssertionError(processes.said()) from None


async def through_it_all(processes: Processes) -> None:
    url = processes.state_url
    await both_serve(url)
    async with client_of(url) as client:
        prompts = [[50 + n, 51, 52] for n in range(NUM_STREAMS)]

        async def ask(prompt: list[int]) -> list[int]:
            answer = await client.generate(prompt, max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True)
            return list(answer.answers[0].token_ids)

        async def ask_all() -> None:
            answers = await asyncio.gather(*map(ask, prompts))
            assert answers == [fake_answer(prompt, MAX_TOKENS) for prompt in prompts]

        while not all((await tokens_generated(url)).values()):  # until the gateway knows both
            await ask_all()
        before = await tokens_generated(url)
        long_ones = [asyncio.create_task(ask(prompt)) for prompt in prompts]
        while any(now == before[group] for group, now in (await tokens_generated(url)).items()):  # noqa: ASYNC110
            await asyncio.sleep(0.02)  # both are at it
        processes.schedulers["b"].send_signal(signal.SIGKILL)
        processes.schedulers["b"].wait()
        assert await ask(prompts[0]) == fake_answer(prompts[0], MAX_TOKENS), "the other group is there"
        processes.start_scheduler("b")
        assert [await answer for answer in long_ones] == [fake_answer(prompt, MAX_TOKENS) for prompt in prompts]
