"""Requests through a live scheduler: every token equals that of an oracle that knows nothing of scheduling."""

import asyncio
import random
from pathlib import Path

import pytest

from .rig import Cluster
from .stages import oracle


@pytest.mark.parametrize("num_stages", [1, 2, 3])
async def test_mixed_arrivals_get_the_oracles_tokens(tmp_path: Path, num_stages: int) -> None:
    rng = random.Random(num_stages)
    async with Cluster(tmp_path, num_stages, flags=["--max-num-seqs", "4"]) as cluster:
        gateway = await cluster.gateway()
        requests = []
        for _ in range(24):
            prompt = [rng.randrange(900) for _ in range(rng.randrange(1, 60))]
            num_tokens = rng.randrange(1, 40)
            requests.append((prompt, num_tokens, await gateway.submit(prompt, num_tokens)))
            await asyncio.sleep(0)
        for prompt, num_tokens, answer in requests:
            await answer.done()
            assert answer.ids == oracle(prompt, num_tokens)
            assert answer.reason == "LENGTH"
