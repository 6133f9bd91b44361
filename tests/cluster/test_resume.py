"""A gateway is killed in the middle of an answer: the client's stream goes on through the other one, token by token."""

import signal
from pathlib import Path

import pytest
from tests.gateway.test_process import gateway
from tests.scheduler.rig import until_async
from tests.scheduler.swap_rig import SwapCluster, be_quick

from fastserve import AsyncClient, RetryPolicy
from fastserve_worker.fake_stage import FakeOptions, fake_answer

pytestmark = pytest.mark.cluster

PROMPT = [40, 41, 42]
VOCAB_SIZE = 200
NUM_TOKENS = 60
PATIENT = RetryPolicy(max_attempts=8)


async def test_a_stream_survives_its_gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    be_quick(monkeypatch)
    options = FakeOptions(vocab_size=VOCAB_SIZE, iteration_ns=20_000_000)
    asked = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True}
    async with (
        SwapCluster(tmp_path, 2, num_blocks=64, num_slots=64, options=options) as cluster,
        gateway(tmp_path, cluster.store) as first,
        gateway(tmp_path, cluster.store),
    ):

        async def both() -> bool:
            return len(await cluster.store.members("gateway")) == 2

        await until_async(both)
        members = await cluster.store.members("gateway")
        (second,) = {info["grpc"] for info in members.values()} - {first.info["grpc"]}
        addresses = f"ipv4:{first.info['grpc']},{second}"
        async with AsyncClient(addresses, timeout_s=100, retry=PATIENT) as client:
            ids: list[int] = []
            text = ""
            async with client.stream(PROMPT, **asked) as stream:  # type: ignore[arg-type]  # options by name
                async for chunk in stream:
                    ids += chunk.token_ids
                    text += chunk.text
                    if len(ids) == 5:
                        first.process.send_signal(signal.SIGKILL)
                        await first.process.wait()
                    usage = chunk.usage
            assert ids == fake_answer(PROMPT, NUM_TOKENS, vocab_size=VOCAB_SIZE)
            assert usage is not None
            assert usage.completion_tokens == NUM_TOKENS
            assert text == await client.detokenize(ids)
