"""`fastserve chat` from a pipe, against the fake OpenAI server that the benchmark is tested with."""

import io

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
