"""The blocking client: values in and out, errors, deadlines, retries, aborting."""

import gc
import threading
from collections.abc import Iterator

import grpc
import pytest

import fastserve
from fastserve import Client, Finish, RetryPolicy, Usage
from fastserve.v1 import inference_pb2 as pb

from .conftest import RunningFake, endless, fails, tokens

FAST_RETRY = RetryPolicy(max_attempts=3, initial_backoff_s=0.001, max_backoff_s=0.002)
GONE_S = 10  # how long a test waits for the server to notice


def make(server: RunningFake, api_key: str | None = None, timeout_s: float | None = None) -> Client:
    return Client(server.address, retry=FAST_RETRY, api_key=api_key, timeout_s=timeout_s)


def test_generate_returns_the_whole_answer(server: RunningFake) -> None:
    server.fake.script = tokens("hello")
    with make(server) as client:
        answer = client.generate("hi", request_id="r1", timeout=10)
    assert (answer.request_id, answer.text, answer.token_ids) == ("r1", "hello", (0,))
    assert answer.finish == Finish("length")
    assert answer.usage == Usage(5, 1)


def test_options_reach_the_wire_under_their_fields(server: RunningFake) -> None:
    server.fake.script = tokens("x")
    with make(server, api_key="secret") as client:
        client.generate(
            [7, 8, 9],
            max_tokens=3,
            min_tokens=1,
            temperature=0.0,
            top_k=5,
            top_p=0.5,
            min_p=0.25,
            seed=-4,
            n=2,
            presence_penalty=0.5,
            frequency_penalty=0.25,
            repetition_penalty=1.5,
            logit_bias={4: -1.0},
            stop="END",
            stop_token_ids=[11],
            include_stop=True,
            ignore_eos=True,
            logprobs=2,
            echo=True,
            priority=-3,
            expected_output_tokens=12,
            program="agent",
            model="m",
            request_id="mine",
        )
    expected = pb.GenerateRequest(
        request_id="mine",
        model="m",
        token_ids=pb.TokenIds(ids=[7, 8, 9]),
        temperature=0.0,
        sampling=pb.Sampling(num_sequences=2, top_k=5, top_p=0.5, min_p=0.25, seed=-4),
        decoding=pb.Decoding(
            presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.5, logit_bias={4: -1.0}
        ),
        stopping=pb.Stopping(
            max_new_tokens=3,
            min_new_tokens=1,
            stop_token_ids=[11],
            stop_strings=["END"],
            include_stop_strings=True,
            ignore_eos=True,
        ),
        response=pb.ResponseOptions(logprobs=2, echo=True),
        priority=-3,
        expected_output_tokens=12,
        program="agent",
    )
    assert server.fake.requests == [expected]
    assert server.fake.metadata[0]["authorization"] == "Bearer secret"


def test_left_out_options_stay_absent(server: RunningFake) -> None:
    server.fake.script = tokens("x")
    with make(server) as client:
        client.generate("hi")
    request = server.fake.requests[0]
    assert request.text == "hi"
    assert not request.HasField("temperature")
    assert not request.stopping.HasField("max_new_tokens")
    assert not request.sampling.HasField("seed")
    assert "authorization" not in server.fake.metadata[0]
    assert request.request_id.startswith("req-")


@pytest.mark.parametrize(("options", "said"), [({"max_token": 3}, "max_token"), ({"max_tokens": -1}, "cannot be sent")])
def test_wrong_options_are_refused_before_sending(server: RunningFake, options: dict[str, int], said: str) -> None:
    with make(server) as client, pytest.raises(fastserve.InvalidRequestError, match=said):
        client.generate("hi", **options)  # type: ignore[arg-type]  # wrong on purpose
    assert server.fake.requests == []


def test_stream_yields_pieces_in_order(server: RunningFake) -> None:
    server.fake.script = tokens("a", "b", "c")
    with make(server) as client:
        chunks = list(client.stream("hi"))
    assert [c.text for c in chunks] == ["a", "b", "c"]
    assert [c.prompt_tokens for c in chunks] == [5, None, None]
    assert [c.finish for c in chunks] == [None, None, Finish("length")]
    assert [c.usage for c in chunks] == [None, None, Usage(5, 3)]


def test_one_chunk_per_answer_and_one_for_bare_counts(server: RunningFake) -> None:
    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        yield pb.GenerateResponse(prompt_info=pb.PromptInfo(num_prompt_tokens=4))
        stop = pb.FinishInfo(reason=pb.FINISH_REASON_STOP, stop_string="END")
        yield pb.GenerateResponse(
            outputs=[pb.SequenceOutput(index=1, text="x"), pb.SequenceOutput(index=0, text="y", finish_info=stop)]
        )
        yield pb.GenerateResponse(usage=pb.Usage(prompt_tokens=4, completion_tokens=2))

    server.fake.script = script
    with make(server) as client:
        chunks = list(client.stream("hi", n=2))
    assert [(c.index, c.text, c.prompt_tokens, c.usage) for c in chunks] == [
        (0, "", 4, None),
        (1, "x", None, None),
        (0, "y", None, None),
        (0, "", None, Usage(4, 2)),
    ]
    assert chunks[2].finish == Finish("stop", stop_string="END")


def test_logprobs_arrive_typed(server: RunningFake) -> None:
    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        output = pb.SequenceOutput(text="x", token_ids=[3])
        entry = output.logprobs.add(token_id=3, logprob=-0.5)
        entry.top.add(token_id=9, logprob=-0.25)
        yield pb.GenerateResponse(outputs=[output])

    server.fake.script = script
    with make(server) as client:
        (chunk,) = client.stream("hi", logprobs=1)
    assert chunk.logprobs == (fastserve.TokenLogprobs(3, -0.5, (fastserve.TopLogprob(9, -0.25),)),)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, fastserve.InvalidRequestError),
        (grpc.StatusCode.UNAUTHENTICATED, fastserve.AuthenticationError),
        (grpc.StatusCode.NOT_FOUND, fastserve.NotFoundError),
        (grpc.StatusCode.ALREADY_EXISTS, fastserve.AlreadyExistsError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, fastserve.ResourceExhaustedError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, fastserve.DeadlineExceededError),
        (grpc.StatusCode.CANCELLED, fastserve.AbortedError),
        (grpc.StatusCode.UNIMPLEMENTED, fastserve.UnsupportedError),
        (grpc.StatusCode.INTERNAL, fastserve.InternalError),
        (grpc.StatusCode.DATA_LOSS, fastserve.InternalError),
    ],
)
def test_each_status_is_a_typed_error_and_is_not_retried(
    server: RunningFake, code: grpc.StatusCode, error: type[fastserve.FastServeError]
) -> None:
    server.fake.script = fails(99, code, tokens("x"))
    with make(server) as client:
        with pytest.raises(error, match="as scripted") as from_unary:
            client.generate("hi", request_id="r")
        with pytest.raises(error, match="as scripted") as from_stream:
            next(client.stream("hi", request_id="r"))
    assert from_unary.value.request_id == from_stream.value.request_id == "r"
    assert len(server.fake.requests) == 2


def test_a_full_queue_says_when_to_come_back(server: RunningFake) -> None:
    full = grpc.StatusCode.RESOURCE_EXHAUSTED
    server.fake.script = fails(99, full, tokens("x"), trailers=(("retry-after-ms", "1500"),))
    with make(server) as client, pytest.raises(fastserve.ResourceExhaustedError) as caught:
        client.generate("hi")
    assert caught.value.retry_after_s == 1.5


def test_unavailable_is_retried_with_a_new_id(server: RunningFake) -> None:
    server.fake.script = fails(2, grpc.StatusCode.UNAVAILABLE, tokens("a", "b"))
    with make(server) as client:
        stream = client.stream("hi")
        assert [c.text for c in stream] == ["a", "b"]
    ids = [r.request_id for r in server.fake.requests]
    assert len(set(ids)) == 3
    assert stream.request_id == ids[-1]


def test_a_given_id_is_kept_over_retries(server: RunningFake) -> None:
    server.fake.script = fails(2, grpc.StatusCode.UNAVAILABLE, tokens("a"))
    with make(server) as client:
        assert client.generate("hi", request_id="mine").text == "a"
    assert [r.request_id for r in server.fake.requests] == ["mine"] * 3


def test_retries_end(server: RunningFake) -> None:
    server.fake.script = fails(99, grpc.StatusCode.UNAVAILABLE, tokens("a"))
    with make(server) as client:
        with pytest.raises(fastserve.UnavailableError):
            client.generate("hi")
        assert len(server.fake.requests) == FAST_RETRY.max_attempts
        stream = client.stream("hi")
        with pytest.raises(fastserve.UnavailableError):
            next(stream)
        assert list(stream) == []
    assert len(server.fake.requests) == 2 * FAST_RETRY.max_attempts


def test_several_answers_are_not_retried_after_the_first_token(server: RunningFake) -> None:
    server.fake.script = fails(1, grpc.StatusCode.UNAVAILABLE, tokens("a", "b"), after=1)
    with make(server) as client:
        stream = client.stream("hi", n=2)
        assert next(stream).text == "a"
        with pytest.raises(fastserve.UnavailableError):
            next(stream)
    assert len(server.fake.requests) == 1


def test_a_lost_stream_goes_on_behind_what_was_heard(server: RunningFake) -> None:
    server.fake.script = fails(1, grpc.StatusCode.UNAVAILABLE, tokens("a", "b"), after=1)
    with make(server) as client, client.stream("hi", echo=True) as stream:
        assert [chunk.text for chunk in stream] == ["a", "a", "b"], "this server says everything again"
        first, again = server.fake.requests
        assert first.request_id == again.request_id == stream.request_id
        assert (list(again.delivered.ids), again.response.echo) == ([0], False)


def test_nothing_but_unavailable_is_retried_after_the_first_token(server: RunningFake) -> None:
    server.fake.script = fails(1, grpc.StatusCode.INTERNAL, tokens("a", "b"), after=1)
    with make(server) as client:
        stream = client.stream("hi")
        assert next(stream).text == "a"
        with pytest.raises(fastserve.InternalError):
            next(stream)
    assert len(server.fake.requests) == 1


def test_a_retry_that_would_pass_the_deadline_is_not_made(server: RunningFake) -> None:
    unavailable = grpc.StatusCode.UNAVAILABLE
    server.fake.script = fails(99, unavailable, tokens("a"), trailers=(("retry-after-ms", "60000"),))
    with make(server) as client, pytest.raises(fastserve.DeadlineExceededError, match="as scripted"):
        client.generate("hi", timeout=30)
    assert len(server.fake.requests) == 1


def test_nobody_listening_is_unavailable() -> None:
    with Client("localhost:1", retry=FAST_RETRY) as client, pytest.raises(fastserve.UnavailableError):
        client.model_info(timeout=10)


@pytest.mark.parametrize("default", [True, False])
def test_the_deadline_ends_the_call_on_both_sides(server: RunningFake, default: bool) -> None:
    server.fake.script = endless
    with make(server, timeout_s=0.2 if default else 60) as client:
        stream = client.stream("hi", timeout=None if default else 0.2)
        assert next(stream).text == "a"
        with pytest.raises(TimeoutError) as caught:
            next(stream)
    assert isinstance(caught.value, fastserve.DeadlineExceededError)
    assert server.fake.ended.acquire(timeout=GONE_S)


def test_leaving_the_block_aborts(server: RunningFake) -> None:
    server.fake.script = endless
    with make(server) as client:
        with client.stream("hi") as stream:
            assert next(stream).text == "a"
        assert server.fake.ended.acquire(timeout=GONE_S)
        assert list(stream) == []


def test_dropping_the_iterator_aborts(server: RunningFake) -> None:
    server.fake.script = endless
    with make(server) as client:
        for chunk in client.stream("hi"):
            assert chunk.text == "a"
            break
        gc.collect()
        assert server.fake.ended.acquire(timeout=GONE_S)


def test_another_thread_can_close_a_waiting_stream(server: RunningFake) -> None:
    server.fake.script = endless
    texts: list[str] = []
    with make(server) as client:
        stream = client.stream("hi")
        texts.append(next(stream).text)
        reader = threading.Thread(target=lambda: texts.extend(c.text for c in stream))
        reader.start()
        stream.close()
        reader.join(GONE_S)
        assert not reader.is_alive()
    assert texts == ["a"]


def test_closing_the_client_ends_its_streams(server: RunningFake) -> None:
    server.fake.script = endless
    client = make(server)
    stream = client.stream("hi")
    next(stream)
    client.close()
    with pytest.raises(fastserve.AbortedError):
        next(stream)
    assert server.fake.ended.acquire(timeout=GONE_S)


def test_the_small_calls(server: RunningFake) -> None:
    with make(server) as client:
        assert client.abort("live") is True
        assert client.abort("dead") is False
        assert client.model_info() == fastserve.ModelInfo("m", "org/m", 128, 256, (2, 3), 2, "fcfs")
        assert client.tokenize("ab") == [97, 98]
        assert client.tokenize("ab", add_special_tokens=True) == [1, 97, 98]
        assert client.detokenize([97, 98]) == "ab"


def test_backoff_grows_to_its_cap_and_respects_the_hint() -> None:
    policy = RetryPolicy(initial_backoff_s=1.0, max_backoff_s=3.0, multiplier=2.0)
    for failures, whole_s in [(1, 1.0), (2, 2.0), (3, 3.0), (9, 3.0)]:
        assert whole_s / 2 <= policy.backoff_s(failures, None) <= whole_s
    assert policy.backoff_s(1, 7.0) == 7.0


@pytest.mark.parametrize("wrong", [{"max_attempts": 0}, {"initial_backoff_s": -1.0}, {"multiplier": 0.5}])
def test_senseless_retry_policies_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"must be|need"):
        RetryPolicy(**wrong)  # type: ignore[arg-type]  # wrong on purpose
