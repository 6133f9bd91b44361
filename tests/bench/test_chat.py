"""`fastserve chat` from a pipe, against the fake OpenAI server that the benchmark is tested with."""

import io
import os
import pty
import select
import signal
import sys
import time
from types import TracebackType
from typing import Self

import pytest

from fastserve.cli.main import main

from .conftest import FakeOpenAi


def chat(monkeypatch: pytest.MonkeyPatch, fake: FakeOpenAi, text: str, *flags: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    return main(["chat", "--url", fake.url, "--max-tokens", "2", *flags])


def test_turns_are_remembered(
    openai: FakeOpenAi, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "hi\n\nagain\n/reset\nnew\n/exit\nnever\n"
    assert chat(monkeypatch, openai, text, "--system", "be kind", "--api-key", "k") == 0
    assert capsys.readouterr().out == "w w \n" * 3
    start = [{"role": "system", "content": "be kind"}]
    first = [*start, {"role": "user", "content": "hi"}]
    second = [*first, {"role": "assistant", "content": "w w "}, {"role": "user", "content": "again"}]
    assert [body["messages"] for body in openai.bodies] == [first, second, [*start, {"role": "user", "content": "new"}]]
    assert {body["model"] for body in openai.bodies} == {"fake"}
    assert openai.headers[0]["authorization"] == "Bearer k"


@pytest.mark.parametrize(
    ("mode", "said"),
    [("full", "HTTP 429: the queue is full"), ("breaks", "stage 1 is gone"), ("plain-500", "HTTP 500")],
)
def test_a_failure_in_a_pipe_ends_with_an_error(
    openai: FakeOpenAi, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mode: str, said: str
) -> None:
    monkeypatch.setattr("fastserve.cli.chat.sampling", lambda args: {"max_tokens": args.max_tokens, "mode": mode})
    assert chat(monkeypatch, openai, "hi\nagain\n") == 1
    assert said in capsys.readouterr().err
    assert len(openai.bodies) == 1


def test_a_named_model_is_used(openai: FakeOpenAi, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chat(monkeypatch, openai, "hi", "--model", "other") == 0
    assert openai.bodies[0]["model"] == "other"


def test_nobody_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat(monkeypatch, FakeOpenAi(url="http://127.0.0.1:1"), "hi") == 1
    assert "cannot connect" in capsys.readouterr().err
    assert chat(monkeypatch, FakeOpenAi(url="127.0.0.1"), "hi") == 2
    assert "--url: base URL" in capsys.readouterr().err


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, *argv: str) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execv(argv[0], argv)
        self.seen = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is not None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.fd)

    def appears(self, text: str, timeout_s: float) -> bool:
        """Read until `text` has appeared since it was last waited for, and forget what came up to it."""
        deadline_s = time.monotonic() + timeout_s
        while text not in self.seen:
            readable, _, _ = select.select([self.fd], [], [], max(deadline_s - time.monotonic(), 0))
            if not readable:
                return False
            self.seen += os.read(self.fd, 4096).decode()
        self.seen = self.seen.partition(text)[2]
        return True

    def expect(self, text: str) -> None:
        assert self.appears(text, 30), f"{text!r} did not appear after {self.seen!r}"

    def write(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")  # the child execs at once
def test_ctrl_c_ends_an_answer_and_not_the_chat(openai: FakeOpenAi) -> None:
    flags = ("--url", openai.url, "--max-tokens", "2", "--model", "hang")
    with Terminal(sys.executable, "-m", "fastserve.cli", "chat", *flags) as terminal:
        terminal.expect("> ")
        terminal.write("\x03")
        # Readline misses a signal that comes between its prompt and its wait; a person presses again, too.
        while not terminal.appears("> ", 2):
            terminal.write("\x03")
        for turn in ("first", "second"):
            terminal.write(f"{turn}\n")
            terminal.expect("w ")
            terminal.write("\x03")
            assert openai.cut_off.acquire(timeout=20)
            terminal.expect("> ")
        terminal.write("\x04")
        assert terminal.wait() == 0
    assert [body["messages"] for body in openai.bodies] == [
        [{"role": "user", "content": turn}] for turn in ("first", "second")
    ]
