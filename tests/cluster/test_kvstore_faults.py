"""A kvstore that is killed or frozen while requests have their KV with it: they are computed again, nothing is left.

Elsewhere a crash left segments behind until no restart succeeded any more (vllm #54002), and a restart of the server of
host memory took the workers with it (LMCache #4069).
"""

import asyncio
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from fastserve import DeadlineExceededError
from fastserve.types import GenerateOptions
from fastserve.v1 import kvstore_pb2, kvstore_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from fastserve_common.channels import open_channel
from fastserve_common.segments import PREFIX, SHM_DIR
from fastserve_common.state import open_state
from fastserve_worker.fake_stage import fake_answer

from .system import System, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

NUM_STREAMS, MAX_TOKENS = 20, 100
#: 64 blocks of 16 tokens; a stream comes to ten.
KV_BYTES = 64 * 16 * 1024
NUM_SWAPPED = 10


class SwapSystem(System):
    """Two fake stages that swap, with everything that can be asked of them."""

    def __init__(self, folder: Path, *args: str) -> None:
        super().__init__(folder, *args, f"--run-dir={folder}/run")
        self.state_url = f"sqlite://{folder}/run/state.db"

    def scheduler(self) -> scheduler_pb2.GetStateResponse:
        async def ask() -> scheduler_pb2.GetStateResponse:
            async with open_channel(await self._address("scheduler")) as channel:
                return await scheduler_pb2_grpc.SchedulerStub(channel).GetState(scheduler_pb2.GetStateRequest())

        return asyncio.run(ask())

    def kvstore(self) -> kvstore_pb2.GetStatusResponse:
        async def ask() -> kvstore_pb2.GetStatusResponse:
            async with open_channel(await self._address("kvstore")) as channel:
                return await kvstore_pb2_grpc.KvStoreStub(channel).GetStatus(kvstore_pb2.GetStatusRequest())

        return asyncio.run(ask())

    async def _address(self, role: str) -> str:
        store = open_state(self.state_url)
        try:
            (facts,) = (await store.members(role)).values()
            return facts["address"]
        finally:
            await store.close()

    def segments(self) -> list[int]:
        """Sizes of the shared memory that processes of this system made."""
        return [p.stat().st_size for p in SHM_DIR.glob(PREFIX + "*") if int(p.name.split("-")[2]) in self._known]

    def kvstore_process(self) -> psutil.Process:
        return self.service("fastserve_kvstore")

    def swaps(self) -> bool:
        """The scheduler has host slots to give."""
        return self.scheduler().host_blocks_total > 0

    def is_clean(self) -> bool:
        """Nothing of any request is left with the scheduler or the kvstore."""
        state, host = self.scheduler(), self.kvstore()
        return (
            not (state.running or state.waiting or state.swapped or state.batches_in_flight or state.swaps_in_flight)
            and state.device_blocks_free == state.device_blocks_total
            and 0 < state.host_blocks_free == state.host_blocks_total
            and host.committed_slots == 0
        )


@dataclass
class Streams:
    """Twenty at once; what each got, and how it ended."""

    system: SwapSystem
    max_tokens: int = MAX_TOKENS
    timeout_s: float | None = None
    ids: dict[int, list[int]] = field(default_factory=dict)
    errors: list[Exception] = field(default_factory=list)

    def start(self) -> "Streams":
        self._threads = [threading.Thread(target=self._one, args=(number,)) for number in range(NUM_STREAMS)]
        for thread in self._threads:
            thread.start()
        return self

    def _one(self, number: int) -> None:
        ids = self.ids[number] = []
        try:
            with self.system.client() as client:
                for chunk in client.stream(prompt(number), timeout=self.timeout_s, **answer_of(self.max_tokens)):
                    ids += chunk.token_ids
        except Exception as error:  # whatever it is, the test looks at it
            self.errors.append(error)

    def all_end(self) -> "Streams":
        wait_until(lambda: not any(thread.is_alive() for thread in self._threads), "every stream ends", self.system)
        return self

    def all_are_right(self) -> None:
        self.all_end()
        assert self.errors == []
        assert self.ids == {number: fake_answer(prompt(number), self.max_tokens) for number in range(NUM_STREAMS)}


def prompt(number: int) -> list[int]:
    return [50 + number, *range(100, 155)]


def answer_of(max_tokens: int) -> GenerateOptions:
    return {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, fake_args: list[str]) -> Iterator[SwapSystem]:
    """One system for the module: each test leaves it as whole as it found it."""
    sizes = [f"--kv-memory={KV_BYTES}", "--host-kv-memory=1MiB", "--max-model-len=512", "--max-num-seqs=2"]
    policy = ["--policy=skip-join-mlfq", "--kv-policy=reactive", "--swap-min-batches=0", "--alpha-ms=500"]
    args = [*fake_args, *sizes, *policy, "--kv-checksums", "--fake-iteration-ms=4"]
    system = SwapSystem(tmp_path_factory.mktemp("system"), *args)
    try:
        system.wait_ready()
        wait_until(system.swaps, "the stages share host memory", system)
        yield system
        assert system.stop() == 0
        system.assert_nothing_left()
        assert "giving up" not in system.said
    finally:
        system.destroy()


def with_ten_on_the_host(system: SwapSystem) -> Streams:
    streams = Streams(system).start()
    wait_until(lambda: system.scheduler().swapped >= NUM_SWAPPED, f"{NUM_SWAPPED} have their KV on the host", system)
    return streams


def kill_with_ten_on_the_host(system: SwapSystem) -> None:
    """The next one has one segment of the same size, and every stream gets the tokens that it would have got."""
    sizes = system.segments()
    streams, victim = with_ten_on_the_host(system), system.kvstore_process()
    generation = system.kvstore().generation
    victim.send_signal(signal.SIGKILL)
    wait_until(lambda: not victim.is_running(), "it is dead", system)
    assert system.kvstore_process().pid != victim.pid
    streams.all_are_right()
    wait_until(system.swaps, "the stages share host memory again", system)
    assert system.kvstore().generation > generation
    assert system.segments() == sizes
    assert len(sizes) == 1
    wait_until(system.is_clean, "nothing is left", system)


def test_requests_on_the_host_outlive_a_kvstore_that_is_killed(system: SwapSystem) -> None:
    kill_with_ten_on_the_host(system)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_five_kills_and_shared_memory_is_what_it_was(system: SwapSystem) -> None:
    for _ in range(5):
        kill_with_ten_on_the_host(system)
        Streams(system).start().all_are_right()


def test_requests_on_the_host_outlive_a_kvstore_that_is_frozen(system: SwapSystem) -> None:
    """It answers nobody and its connections stay up. What is in the arena stays there; nobody has to wait for it."""
    streams, victim = with_ten_on_the_host(system), system.kvstore_process()
    victim.suspend()
    try:
        streams.all_are_right()
    finally:
        victim.resume()
    wait_until(system.is_clean, "nothing is left", system)
    assert system.kvstore_process().pid == victim.pid
    with system.client() as client:
        answer = client.generate(prompt(0), **answer_of(4)).answers[0]
    assert list(answer.token_ids) == fake_answer(prompt(0), 4)


def test_deadlines_of_requests_on_the_host_leave_nothing_there(system: SwapSystem) -> None:
    """Twenty streams of 300 tokens: two stages of 4 ms and two requests each take 12 s at best; clients wait for 4."""
    before = system.scheduler().swaps_out
    streams = Streams(system, max_tokens=300, timeout_s=4.0).start()
    wait_until(lambda: system.scheduler().swaps_out > before, "KV is on its way to the host", system)
    streams.all_end()
    assert any(isinstance(error, DeadlineExceededError) for error in streams.errors)
    for number, ids in streams.ids.items():
        assert ids == fake_answer(prompt(number), 300)[: len(ids)]
    wait_until(system.is_clean, "nothing is left", system)
