"""kill -9 of each process in turn, in the middle of an answer. What the table of failures promises, holds."""

import signal
from collections.abc import Callable, Iterator

import pytest

from fastserve import AbortedError, FastServeError, UnavailableError
from fastserve_worker.fake_stage import fake_answer

from .system import System, wait_until

pytestmark = pytest.mark.cluster

PROMPT = [50, 51, 52, 53]
MAX_TOKENS = 60


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, fake_args: list[str]) -> Iterator[System]:
    """One system for the module: each test leaves it as whole as it found it."""
    system = System(tmp_path_factory.mktemp("system"), *fake_args, "--fake-iteration-ms=20")
    try:
        system.wait_ready()
        yield system
        assert system.stop() == 0
        system.assert_nothing_left()
        assert "giving up" not in system.said
    finally:
        system.destroy()


def generate(system: System, max_tokens: int = 4) -> list[int]:
    with system.client() as client:
        return list(client.generate(PROMPT, max_tokens=max_tokens, temperature=0, ignore_eos=True).answers[0].token_ids)


def serves(system: System) -> Callable[[], bool]:
    def attempt() -> bool:
        try:
            return generate(system) == fake_answer(PROMPT, 4)
        except FastServeError:
            return False

    return attempt


def stream_and_kill(system: System, module: str, *flags: str) -> list[int]:
    """The ids of an answer during which the process was killed after its third token."""
    victim = system.service(module, *flags)
    ids: list[int] = []
    with system.client() as client:
        for chunk in client.stream(PROMPT, max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True):
            ids += chunk.token_ids
            if len(ids) >= 3 and victim.is_running():
                victim.send_signal(signal.SIGKILL)
                wait_until(lambda: not victim.is_running(), "it is dead", system)
    return ids


@pytest.mark.parametrize("stage", [0, 1])
def test_a_killed_stage_costs_no_token(system: System, stage: int) -> None:
    assert stream_and_kill(system, "fastserve_worker", f"--stage={stage}") == fake_answer(PROMPT, MAX_TOKENS)
    assert generate(system) == fake_answer(PROMPT, 4)
    assert f"stage-{stage} was ended by SIGKILL" in system.said


def test_a_killed_scheduler_costs_no_token(system: System) -> None:
    assert stream_and_kill(system, "fastserve_scheduler") == fake_answer(PROMPT, MAX_TOKENS)
    assert generate(system) == fake_answer(PROMPT, 4)


def test_a_killed_kvstore_is_not_noticed(system: System) -> None:
    assert stream_and_kill(system, "fastserve_kvstore") == fake_answer(PROMPT, MAX_TOKENS)
    system.service("fastserve_kvstore")
    assert generate(system) == fake_answer(PROMPT, 4)


def test_a_killed_gateway_costs_its_clients_and_comes_back_where_it_was(system: System) -> None:
    with pytest.raises((UnavailableError, AbortedError)):
        stream_and_kill(system, "fastserve_gateway")
    wait_until(serves(system), "the same address serves again", system)


def test_a_service_that_is_asked_to_end_is_started_again(system: System) -> None:
    """An operator's kill of one process is no wish to end the system."""
    victim = system.service("fastserve_scheduler")
    victim.terminate()
    wait_until(lambda: not victim.is_running(), "it ends", system)
    wait_until(serves(system), "it serves again", system)
    assert system.service("fastserve_scheduler").pid != victim.pid
