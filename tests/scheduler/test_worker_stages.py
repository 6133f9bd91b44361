"""The same scheduler over the worker's own stage service: the two sides of the contract meet without torch."""

import contextlib
import uuid
from collections.abc import Sequence
from pathlib import Path

import pytest

from fastserve_common.state import membership
from fastserve_worker.fake_stage import FakeOptions, FakeStage, FakeStageServer, fake_answer

from .rig import Cluster, TestGateway, until, until_async


class WorkerCluster(Cluster):
    """Stages are served by the worker; the scripted ones stay away."""

    def __init__(
        self, folder: Path, num_stages: int, options: FakeOptions, *, flags: Sequence[str] = (), **shape: int
    ) -> None:
        super().__init__(folder, num_stages, flags=flags)
        self._num_stages, self._options, self._shape = num_stages, options, shape
        self.fakes: dict[int, FakeStage] = {}
        self._exits = [contextlib.AsyncExitStack() for _ in range(num_stages)]

    async def start_stage(self, stage: int) -> None:
        fake = self.fakes[stage] = FakeStage(
            stage=stage, num_stages=self._num_stages, options=self._options, **self._shape
        )
        server = await self._exits[stage].enter_async_context(FakeStageServer(fake))
        info = {"address": server.address, "incarnation": uuid.uuid4().hex}
        await self._exits[stage].enter_async_context(membership(self.store, "stage", f"stage-{stage}", info))

    async def kill_stage(self, stage: int) -> None:
        await self._exits[stage].aclose()

    async def __aenter__(self) -> "WorkerCluster":
        for stage in range(self._num_stages):
            await self.start_stage(stage)
        await self.start_scheduler()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        try:
            await super().__aexit__(*exc_info)
        finally:
            for stage in range(self._num_stages):
                await self.kill_stage(stage)


async def _ask_all(gateway: TestGateway, num_tokens: int) -> None:
    answers = [await gateway.submit([n, n + 1, *range(n)], num_tokens) for n in range(1, 13)]
    for n, answer in enumerate(answers, 1):
        assert (await answer.done()).ids == fake_answer([n, n + 1, *range(n)], num_tokens)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
async def test_answers_are_those_of_the_workers_oracle(tmp_path: Path, num_stages: int) -> None:
    """Twelve blocks of four tokens: two or three requests at a time, the others lose theirs."""
    options = FakeOptions(iteration_ns=100_000, token_ns=1_000)
    async with WorkerCluster(tmp_path, num_stages, options, num_blocks=12, block_size=4) as cluster:
        await _ask_all(await cluster.gateway(), 15)


@pytest.mark.parametrize("victim", [0, 1])
async def test_a_worker_that_dies_costs_no_token(tmp_path: Path, victim: int) -> None:
    options = FakeOptions(iteration_ns=1_000_000, token_ns=1_000)
    async with WorkerCluster(tmp_path, 2, options) as cluster:
        gateway = await cluster.gateway()
        answer = await gateway.submit([1, 2, 3], 80)
        await until(lambda: len(answer.ids) > 10)
        await cluster.kill_stage(victim)
        await until(lambda: not gateway.statuses[-1].ready)
        await cluster.start_stage(victim)
        assert (await answer.done()).ids == fake_answer([1, 2, 3], 80)


async def test_a_plan_that_a_worker_cannot_carry_out_is_tried_again(tmp_path: Path) -> None:
    options = FakeOptions(iteration_ns=100_000, token_ns=1_000, fault_on=frozenset({4, 9}))
    async with WorkerCluster(tmp_path, 2, options) as cluster:
        await _ask_all(await cluster.gateway(), 15)


@pytest.mark.parametrize("num_stages", [1, 2, 4])
async def test_every_kind_of_batch_passes_any_number_of_stages(tmp_path: Path, num_stages: int) -> None:
    """Inner chunks of a prompt alone, one token in and out, nothing but requests that were aborted in flight."""
    flags = ["--max-num-seqs", "4", "--max-num-batched-tokens", "16", "--prefill-chunk-tokens", "8"]
    async with WorkerCluster(tmp_path, num_stages, FakeOptions(iteration_ns=100_000), flags=flags) as cluster:
        gateway = await cluster.gateway()
        long_prompt = [n % 50 for n in range(200)]
        assert (await gateway.ask(long_prompt, 3)).ids == fake_answer(long_prompt, 3)
        assert (await cluster.state()).iterations >= len(long_prompt) // 16, "a chunk each, but the last without a draw"
        assert (await gateway.ask([7], 1)).ids == fake_answer([7], 1)

        last = cluster.fakes[num_stages - 1]
        last.gate.clear()
        answers = [await gateway.submit([n, 3], 20, request_id=f"aborted-{n}") for n in range(8)]

        async def is_full() -> bool:
            return (await cluster.state()).batches_in_flight == num_stages

        await until_async(is_full)
        for request_id in list(gateway.answers):
            if request_id.startswith("aborted"):
                await gateway.cancel(request_id)
        last.gate.set()
        assert [(await answer.done()).reason for answer in answers] == ["CANCELLED"] * len(answers)
        assert (await gateway.ask([7, 8], 9)).ids == fake_answer([7, 8], 9)
