"""Two pipelines of real processes behind one scheduler: both serve, and each is the other's spare."""

import signal
import threading
from pathlib import Path

import pytest

from fastserve_worker.fake_stage import fake_answer

from .conftest import Start
from .system import System, wait_until

pytestmark = pytest.mark.cluster

MAX_TOKENS = 60


def answers(system: System, prompts: list[list[int]], started: threading.Barrier) -> list[list[int]]:
    """What each prompt got. All are under way when `started` is passed."""
    got: list[list[int]] = [[] for _ in prompts]

    def ask(index: int) -> None:
        with system.client() as client:
            for chunk in client.stream(prompts[index], max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True):
                first = not got[index]
                got[index] += chunk.token_ids
                if first:
                    started.wait()

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    started.wait()
    for thread in threads:
        thread.join()
    return got


def test_a_killed_stage_of_one_replica_costs_no_token(start: Start, tmp_path: Path) -> None:
    system = start("--replicas=2", "--fake-iteration-ms=20")
    system.wait_ready()
    prompts = [[50 + n, 51, 52, 53] for n in range(6)]
    victim = system.service("fastserve_worker", "--replica=1", "--stage=1")

    def kill() -> None:
        victim.send_signal(signal.SIGKILL)

    got = answers(system, prompts, threading.Barrier(len(prompts) + 1, action=kill))
    assert got == [fake_answer(prompt, MAX_TOKENS) for prompt in prompts]
    wait_until(lambda: "stage-1-1 was ended by SIGKILL" in system.said, "the supervisor has seen it", system)
    assert system.stop() == 0
    system.assert_nothing_left()
