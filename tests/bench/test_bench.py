"""The whole benchmark against a fake OpenAI server: good answers, failures, timeouts, files."""

import argparse
import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from fastserve.bench import command, options

from .conftest import FakeOpenAi


def parse(*flags: str) -> options.Options:
    parser = argparse.ArgumentParser()
    options.add_arguments(parser)
    return options.from_args(parser.parse_args(flags))


def bench(fake: FakeOpenAi, tmp_path: Path, *flags: str) -> tuple[int, dict[str, object], str]:
    """The exit status, the result file and what was printed."""
    out = io.StringIO()
    common = ("--base-url", fake.url, "--disable-progress", "--save-detailed", "--result-dir", str(tmp_path))
    status = command.run(
        parse(
            "--dataset-name", "random", "--input-len", "6", "--output-len", "4", "--num-prompts", "5", *common, *flags
        ),
        Console(file=out, width=120),
    )
    files = list(tmp_path.glob("*.json"))
    return status, json.loads(files[0].read_text()) if files else {}, out.getvalue()


def test_a_good_run(openai: FakeOpenAi, tmp_path: Path) -> None:
    status, result, printed = bench(
        openai, tmp_path, "--ignore-eos", "--label", "x", "--metadata", "gpu=none", "--goodput", "e2el:60000",
        "--request-rate", "200", "--extra-body", '{"note": 1}', "--api-key", "k", "--header", "X-A=b",
    )  # fmt: skip
    assert status == 0
    assert (result["completed"], result["failed"]) == (5, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (30, 20)
    assert (result["model_id"], result["tokenizer_id"], result["gpu"]) == ("fake", "org/fake", "none")
    assert (result["request_rate"], result["arrivals"]) == (200, "gamma")
    assert result["request_goodput"] == result["request_throughput"]
    assert [len(gaps) for gaps in result["itls"]] == [3] * 5  # type: ignore[attr-defined]  # it is a list
    assert result["generated_texts"] == ["w w w w "] * 5
    assert list(tmp_path.glob("x-200.0qps-fake-*.json"))
    body = openai.bodies[0]
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("fake", 4, 0.0)
    assert (body["stream"], body["ignore_eos"], body["note"]) == (True, True, 1)
    assert body["stream_options"] == {"include_usage": True}
    assert len(body["prompt"]) == 6  # type: ignore[arg-type]  # it is a list
    assert openai.headers[0]["authorization"] == "Bearer k"
    assert openai.headers[0]["x-a"] == "b"
    for line in ("Successful requests", "Mean", "P99", "Normalised latency (s/token)", "tails by output length"):
        assert line in printed


def test_same_seed_same_requests(openai: FakeOpenAi, tmp_path: Path) -> None:
    for _ in range(2):
        bench(openai, tmp_path, "--request-rate", "500")
    prompts = [body["prompt"] for body in openai.bodies]
    assert sorted(map(str, prompts[:5])) == sorted(map(str, prompts[5:]))


def test_chat(openai: FakeOpenAi, tmp_path: Path) -> None:
    status, result, _ = bench(openai, tmp_path, "--backend", "openai-chat")
    assert (status, result["completed"], result["endpoint_type"]) == (0, 5, "openai-chat")
    assert [len(gaps) for gaps in result["itls"]] == [3] * 5  # type: ignore[attr-defined]  # the role is no token
    assert result["input_lens"] == [7] * 5  # the server's count
    messages = openai.bodies[0]["messages"]
    assert isinstance(messages, list)
    assert len(messages[0]["content"].split()) == 6


def test_concurrency_is_capped_and_waiting_is_reported(openai: FakeOpenAi, tmp_path: Path) -> None:
    _, result, _ = bench(openai, tmp_path, "--max-concurrency", "1", "--num-prompts", "8")
    assert result["max_concurrent_requests"] == 1
    assert result["mean_client_queue_time_ms"] > 0  # type: ignore[operator]  # it is a number


def test_without_usage_pieces_are_counted(openai: FakeOpenAi, tmp_path: Path) -> None:
    _, result, _ = bench(openai, tmp_path, "--extra-body", '{"mode": "no-usage"}')
    assert (result["input_lens"], result["output_lens"]) == ([6] * 5, [4] * 5)


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("full", "HTTP 429: the queue is full"),
        ("plain-500", "HTTP 500: oops"),
        ("breaks", "the server failed in mid-stream: stage 1 is gone"),
        ("garbage", "an event that is not a completion"),
        ("cut", "the stream ended before [DONE]"),
    ],
)
def test_failures_are_counted_and_named(openai: FakeOpenAi, tmp_path: Path, mode: str, said: str) -> None:
    status, result, printed = bench(openai, tmp_path, "--extra-body", json.dumps({"mode": mode}))
    assert (status, result["completed"], result["failed"]) == (1, 0, 5)
    assert all(said in error for error in result["errors"])  # type: ignore[attr-defined]  # it is a list
    assert said in printed
    assert "no request completed" in printed


def test_some_fail_and_the_rest_is_measured(openai: FakeOpenAi, tmp_path: Path) -> None:
    status, result, printed = bench(
        openai, tmp_path, "--num-prompts", "6", "--max-concurrency", "1", "--extra-body", '{"mode": "every-other-full"}'
    )
    assert (status, result["completed"], result["failed"]) == (0, 3, 3)
    assert result["total_output_tokens"] == 12
    assert "3 x HTTP 429" in printed
    assert "3 requests failed" in printed


def test_a_slow_server_runs_into_the_timeout_and_is_told(openai: FakeOpenAi, tmp_path: Path) -> None:
    status, result, _ = bench(openai, tmp_path, "--timeout", "0.5", "--extra-body", '{"mode": "hang"}')
    assert (status, result["failed"]) == (1, 5)
    assert set(result["errors"]) == {"no complete answer within 0.5 s"}  # type: ignore[call-overload]  # it is a list
    assert all(ttft > 0 for ttft in result["ttfts"])  # type: ignore[attr-defined]  # the first piece had come
    for _ in range(5):
        assert openai.cut_off.acquire(timeout=10)


def test_warm_ups_are_not_measured(openai: FakeOpenAi, tmp_path: Path) -> None:
    _, result, _ = bench(openai, tmp_path, "--warmups", "2")
    assert (result["completed"], len(openai.bodies)) == (5, 7)


def test_a_failing_warm_up_ends_the_run(openai: FakeOpenAi, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, result, _ = bench(openai, tmp_path, "--warmups", "1", "--extra-body", '{"mode": "full"}')
    assert (status, result) == (1, {})
    assert "a warm-up request failed: HTTP 429" in capsys.readouterr().err


def test_sharegpt_texts_are_counted_by_the_server(openai: FakeOpenAi, tmp_path: Path) -> None:
    data = tmp_path / "data"
    turns = [{"from": "human", "value": "one two three four five"}, {"from": "gpt", "value": "a b c d"}]
    data.write_text(json.dumps([{"id": "1", "conversations": turns}]))
    _, result, _ = bench(openai, tmp_path, "--dataset-name", "sharegpt", "--dataset-path", str(data))
    assert openai.bodies[0]["prompt"] == "one two three four five"
    assert result["output_lens"] == [4] * 5


def test_a_trace_is_replayed(openai: FakeOpenAi, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.write_text("\n".join(f'{{"timestamp": {t}, "input_length": 3, "output_length": 2}}' for t in (0, 100, 200)))
    flags = ("--dataset-name", "mooncake", "--dataset-path", str(data), "--time-scale", "0.5")
    _, result, _ = bench(openai, tmp_path, *flags)
    assert (result["num_prompts"], result["arrivals"], result["request_rate"]) == (3, "trace", 20.0)


def test_plot(openai: FakeOpenAi, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "run.png"
    assert bench(openai, tmp_path, "--plot", str(picture))[0] == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_plot_without_matplotlib_says_so(
    openai: FakeOpenAi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    assert bench(openai, tmp_path, "--plot", str(tmp_path / "run.png"))[0] == 1
    assert "pip install matplotlib" in capsys.readouterr().err


def test_nobody_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(FakeOpenAi(url="http://127.0.0.1:1"), tmp_path, "--ready-check-timeout-sec", "0.01")[0] == 1
    assert "cannot connect to 127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--num-prompts 0", "--num-prompts must be above 0"),
        ("--request-rate 0", "--request-rate must be above 0"),
        ("--max-output-len -1", "--max-output-len must be above 0"),
        ("--dataset-name azure", "needs --dataset-path"),
        ("--timeout -1", "cannot be negative"),
        ("--ramp-up-strategy linear", "needs --ramp-up-start-rps"),
        ("--ramp-up-strategy linear --ramp-up-start-rps 0 --ramp-up-end-rps 1", "above 0"),
        ("--ramp-up-strategy linear --ramp-up-start-rps 1 --ramp-up-end-rps 2 --request-rate 3", "exclude each other"),
        ("--extra-body [1]", "must be a JSON object"),
        ("--extra-body {", "not JSON"),
        ("--percentile-metrics ttft,tbt", "'tbt' is not one of"),
        ("--metric-percentiles 50,x", "not a list of numbers"),
        ("--metric-percentiles 101", "between 0 and 100"),
        ("--goodput ttft", "not NAME:MS"),
        ("--goodput itl:5", "not one of ttft, tpot, e2el"),
        ("--header novalue", "not KEY=VALUE"),
    ],
)
def test_wrong_flags_are_refused_with_a_sentence(flags: str, said: str) -> None:
    with pytest.raises(options.OptionError) as caught:
        parse(*flags.split())
    assert said in str(caught.value)


def test_defaults_follow_the_backend() -> None:
    assert parse().endpoint == "/v1/completions"
    assert parse("--backend", "openai-chat", "--port", "9").base_url == "http://127.0.0.1:9"
    assert parse("--backend", "openai-chat").endpoint == "/v1/chat/completions"
    assert parse("--backend", "fastserve-grpc").address == "127.0.0.1:8001"
    assert parse("--percentile-metrics", "e2el,ttft").output.metrics == ("ttft", "e2el")
