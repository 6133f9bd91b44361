"""`fastserve generate` against the fake server."""

import io

import grpc
import pytest

from fastserve.cli import generate
from fastserve.cli.main import main
from fastserve.v1 import inference_pb2 as pb

from .conftest import RunningFake, fails, tokens


def test_the_answer_is_written(server: RunningFake, capsys: pytest.CaptureFixture[str]) -> None:
    server.fake.script = tokens("once ", "more")
    sampling = ["--max-tokens", "9", "--temperature", "0", "--top-p", "0.5", "--top-k", "3", "--seed", "7"]
    flags = [*sampling, "--stop", "END", "--ignore-eos", "--priority", "-1"]
    argv = ["generate", "hi", "--address", server.address, "--api-key", "k", "--stats", *flags]
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert out == "once more\n"
    assert err.startswith("5 prompt tokens, 2 generated in ")
    request = server.fake.requests[0]
    assert request.text == "hi"
    assert request.sampling == pb.Sampling(num_sequences=1, top_p=0.5, top_k=3, seed=7)
    assert request.stopping == pb.Stopping(max_new_tokens=9, stop_strings=["END"], ignore_eos=True)
    assert (request.HasField("temperature"), request.temperature, request.priority) == (True, 0.0, -1)
    assert server.fake.metadata[0]["authorization"] == "Bearer k"


@pytest.mark.parametrize("argument", [[], ["-"]])
def test_the_prompt_can_come_from_a_pipe(
    server: RunningFake, argument: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.fake.script = tokens("x")
    monkeypatch.setattr("sys.stdin", io.StringIO("two\nlines"))
    assert generate.run([*argument, "--address", server.address]) == 0
    assert server.fake.requests[0].text == "two\nlines"


def test_failures_are_one_sentence(server: RunningFake, capsys: pytest.CaptureFixture[str]) -> None:
    server.fake.script = fails(1, grpc.StatusCode.INVALID_ARGUMENT, tokens("x"))
    assert main(["generate", "hi", "--address", server.address]) == 1
    assert capsys.readouterr().err == "fastserve generate: as scripted\n"


@pytest.mark.parametrize(("argv", "said"), [([""], "prompt is empty"), (["a", "b"], "unrecognized arguments: b")])
def test_wrong_usage(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", *argv]) == 2
    assert said in capsys.readouterr().err
