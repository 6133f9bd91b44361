"""One command up, one Ctrl-C down, and nothing left behind however it ends."""

import signal
import threading
from collections.abc import Callable

import openai
import psutil
import pytest

from fastserve import Chunk, FastServeError, UnavailableError
from fastserve_worker.fake_stage import fake_answer

from .system import System, wait_until

pytestmark = pytest.mark.cluster

Start = Callable[..., System]
PROMPT = [40, 41, 42]


class Streaming:
    """A request in flight on a thread of its own."""

    def __init__(self, system: System, max_tokens: int) -> None:
        self.ids: list[int] = []
        self.last: Chunk | None = None
        self.error: FastServeError | None = None
        self._system = system
        self._max_tokens = max_tokens
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with self._system.client() as client:
                for chunk in client.stream(PROMPT, max_tokens=self._max_tokens, temperature=0, ignore_eos=True):
                    self.ids += chunk.token_ids
                    self.last = chunk
        except FastServeError as error:
            self.error = error

    def wait_tokens(self, count: int) -> None:
        wait_until(lambda: len(self.ids) >= count or self.error is not None, f"{count} tokens", self._system)
        assert self.error is None

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()


def test_up_chat_ctrl_c_and_nothing_is_left(start: Start) -> None:
    system = start()
    system.wait_ready()
    with openai.OpenAI(base_url=f"http://{system.http}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model="words", messages=[{"role": "user", "content": "w40 w41 w42"}], max_tokens=8, temperature=0
        )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert answer.choices[0].message.content == "".join(f"w{i}" for i in fake_answer(PROMPT, 8))
    assert f"curl http://{system.http}/v1/chat/completions" in system.said
    assert system.stop() == 0
    system.assert_nothing_left()
    assert list(system.folder.iterdir()) == [], "the run's folder is gone"
    assert "Traceback" not in system.said


def test_a_killed_supervisor_leaves_nothing(start: Start) -> None:
    system = start()
    system.wait_ready()
    assert len(system.living()) == 5
    system.process.kill()
    system.assert_nothing_left()
    (abandoned,) = system.folder.glob("fastserve-*")
    again = System(system.folder, "--version-is-not-a-setting")
    assert again.wait() == 2
    assert abandoned.exists(), "a refused start touches nothing"


def test_a_supervisor_killed_while_its_children_start_leaves_nothing(start: Start) -> None:
    system = start()
    wait_until(lambda: len(system.note_processes()) >= 3, "children exist", system)
    system.process.kill()
    system.assert_nothing_left()


def test_the_second_ctrl_c_ends_it_at_once(start: Start) -> None:
    system = start("--fake-iteration-ms=50", "--drain-timeout=600")
    system.wait_ready()
    streaming = Streaming(system, max_tokens=3000)
    streaming.wait_tokens(1)
    system.signal(signal.SIGINT)
    system.wait_said("stopping")
    assert system.process.poll() is None, "it waits for the request in flight"
    system.signal(signal.SIGINT)
    assert system.wait() == 130
    system.assert_nothing_left()
    assert list(system.folder.iterdir()) == []
    streaming.join()


def test_what_is_in_flight_is_finished_and_what_is_new_is_refused(start: Start) -> None:
    system = start("--fake-iteration-ms=20")
    system.wait_ready()
    streaming = Streaming(system, max_tokens=100)
    streaming.wait_tokens(1)
    system.process.send_signal(signal.SIGTERM)
    system.wait_said("stopping")
    with system.client() as client, pytest.raises(UnavailableError):
        client.generate(PROMPT, max_tokens=1)
    streaming.join()
    assert streaming.error is None
    assert streaming.ids == fake_answer(PROMPT, 100)
    assert system.wait() == 0
    system.assert_nothing_left()


def test_a_request_that_outlives_the_drain_does_not_hold_the_end(start: Start) -> None:
    system = start("--fake-iteration-ms=50", "--drain-timeout=0.5")
    system.wait_ready()
    streaming = Streaming(system, max_tokens=3000)
    streaming.wait_tokens(1)
    assert system.stop() == 0
    streaming.join()
    assert streaming.error is not None, "an answer that was cut off is not passed off as a whole one"
    system.assert_nothing_left()


def test_stopped_while_starting(start: Start) -> None:
    system = start()
    system.wait_said("loading 2 stages")
    assert system.stop() == 0
    system.assert_nothing_left()
    assert list(system.folder.iterdir()) == []


def test_a_stage_that_cannot_start_ends_the_start_with_its_own_words(start: Start) -> None:
    system = start("--kv-memory=1MiB", "--max-model-len=100000")
    assert system.wait() == 1
    assert "stage-0 ended with status 2 while starting" in system.said or "stage-1 ended" in system.said
    assert "less than one sequence of 100000" in system.said
    assert "Traceback" not in system.said
    system.assert_nothing_left()


def test_two_systems_on_one_machine_do_not_disturb_each_other(start: Start) -> None:
    first, second = start(), start("--stages=1", "--host-kv-memory=0")
    first.wait_ready()
    second.wait_ready()
    assert len(second.living()) == 3, "one stage, no kvstore"
    assert second.stop() == 0
    second.assert_nothing_left()
    with first.client() as client:
        assert list(client.generate(PROMPT, max_tokens=4, temperature=0).answers[0].token_ids) == fake_answer(PROMPT, 4)
    assert first.stop() == 0


def test_a_process_that_dies_again_and_again_is_given_up(start: Start) -> None:
    system = start()
    system.wait_ready()
    killed: set[int] = set()

    def kill_it_again() -> bool:
        for process in system.note_processes():
            if process.pid not in killed and "--stage=1" in (process.cmdline() if process.is_running() else []):
                killed.add(process.pid)
                process.kill()
        return system.process.poll() is not None

    wait_until(lambda: _ignoring_gone(kill_it_again), "it gives up", system)
    assert system.wait() == 1
    assert "stage-1 was ended by SIGKILL" in system.said
    assert "giving up" in system.said
    assert len(killed) == 6
    system.assert_nothing_left()


def _ignoring_gone(attempt: Callable[[], bool]) -> bool:
    try:
        return attempt()
    except psutil.Error:
        return False
