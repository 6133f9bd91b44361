"""Hostile and unsupported values: each gets its defined answer, and a neighbour's stream goes on undisturbed."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import grpc
import pytest

from fastserve.v1 import inference_pb2
from fastserve_gateway import limits

from .fake_scheduler import Script
from .models import VOCAB_SIZE
from .rig import Rig, rig, until

INF, NAN = float("inf"), float("nan")
HUGE = 10**400

#: Field -> values that are refused with 400 and `param` = the field, in completions and in chat.
SHARED: dict[str, list[object]] = {
    "model": [5, ["tiny"], {}],
    "n": [0, -1, 129, 1.5, "1", True, HUGE, 2**32],
    "best_of": [2, 0],
    "max_tokens": [0, -1, "1", 1.5, 2**32, HUGE],
    "min_tokens": [-1, 2**32, "1", 999],
    "temperature": [-0.1, 101, NAN, INF, -INF, "1", HUGE, [1]],
    "top_p": [0, -1, 1.01, NAN, "1"],
    "top_k": [-2, 1.5, "5", 2**32],
    "min_p": [-0.1, 1.1, NAN],
    "seed": [2**63, -(2**63) - 1, 1.5, "1", HUGE],
    "presence_penalty": [-2.1, 2.1, NAN],
    "frequency_penalty": [-2.1, 2.1, INF],
    "repetition_penalty": [0, -1, 101, NAN],
    "logit_bias": [
        {"x": 1}, {"-1": 1}, {"1.5": 1}, {str(VOCAB_SIZE): 1}, {"9" * 30: 1}, {"1": 101}, {"1": NAN}, {"1": "x"},
        {"\u0661": 1}, [1], {str(k): 0 for k in range(1025)},
    ],
    "stop": ["", ["a", ""], ["a"] * 17, "x" * 1025, "x" * 2**20, 5, [5], {"a": 1}],
    "stop_token_ids": [[-1], [VOCAB_SIZE], [1.5], ["1"], 5, list(range(257))],
    "ignore_eos": ["yes", 1],
    "include_stop_str_in_output": ["yes", 0],
    "priority": [2**31, -(2**31) - 1, 1.5, "high"],
    "expected_output_tokens": [-1, 2**32, 1.5, "long"],
    "program": ["x" * 129, 5],
    "request_id": ["a b", "a#1", "\u4f60", "x" * 129, "a\n", 5],
    "stream": ["yes", 1],
    "stream_options": [{"include_usage": True}, 5],
    "add_special_tokens": ["yes"],
    "response_format": [{"type": "json_object"}, {"type": "json_schema", "json_schema": {}}, "text"],
    "user": [5, {}],
    "store": [True],
    "metadata": [{"a": "b"}],
    "service_tier": ["priority"],
    "bad_words": [["x"]],
    "guided_json": [{}],
    "structured_outputs": [{"regex": "a"}],
    "prompt_logprobs": [0],
    "skip_special_tokens": [False],
    "no_such_field": [None, 1],
}  # fmt: skip

COMPLETIONS: dict[str, list[object]] = {
    **SHARED,
    "prompt": [
        None, 5, {}, True, [], [[]], ["x", 5], [1, "x"], [[1], "x"], [1.5], [True], [[True]], [-1], [VOCAB_SIZE],
        [[1], [VOCAB_SIZE]], [2**64], [HUGE], "", "\ud800", ["x"] * 129, [[[1]]], "x" * 5000,
    ],
    "logprobs": [-1, 21, "1", True, 1.5],
    "echo": ["yes", 1],
    "suffix": ["x", 5],
}  # fmt: skip

CHAT: dict[str, list[object]] = {
    **SHARED,
    "messages": [
        None, "hi", [], {}, [5], [{}], [{"role": "user"}, 5], [{"role": "x", "content": "a"}],
        [{"role": "user", "content": 5}], [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": "a", "tool_calls": [{"id": "x"}]}],
        [{"role": "tool", "content": "x"}], [{"role": "user", "content": "\ud800"}],
        [{"role": "user", "content": "x" * 5000}], [{"role": "user", "content": "x"}] * 4097,
    ],
    "max_completion_tokens": [0, -1, "1", 2**32],
    "logprobs": [1, "yes"],
    "top_logprobs": [-1, 21, 2],
    "tools": [[{"type": "function", "function": {"name": "f"}}], {}],
    "tool_choice": ["required", {"type": "function"}],
    "functions": [[{"name": "f"}]],
    "function_call": ["auto"],
    "modalities": [["audio"]],
    "audio": [{"voice": "x"}],
    "prediction": [{"type": "content"}],
    "reasoning_effort": ["low"],
    "web_search_options": [{}],
    "chat_template": ["{{ x }}"],
    "continue_final_message": [True],
    "documents": [[{"text": "x"}]],
    "chat_template_kwargs": [5, {str(k): 1 for k in range(65)}],
}  # fmt: skip

#: Values that mean "not used" of fields that are otherwise refused.
NEUTRAL: dict[str, object] = {
    "suffix": None, "best_of": 1, "response_format": {"type": "text"}, "user": "alice", "store": False, "metadata": {},
    "service_tier": "auto", "bad_words": [], "logit_bias": {}, "stop": None, "n": None, "stream_options": None,
    "prompt_logprobs": None, "use_beam_search": False, "length_penalty": 1.0, "temperature": None, "seed": None,
}  # fmt: skip
NEUTRAL_CHAT: dict[str, object] = {
    **{name: value for name, value in NEUTRAL.items() if name != "suffix"},
    "tools": [], "tool_choice": "none", "parallel_tool_calls": True, "functions": None, "modalities": ["text"],
    "audio": None, "reasoning_effort": None, "top_logprobs": None, "logprobs": False,
}  # fmt: skip


class Neighbour:
    """A stream that runs all the while; it must come out whole."""

    def __init__(self, r: Rig) -> None:
        self._rig = r
        self.gate = asyncio.Semaphore(0)
        self.script = Script(ids=[*b"undisturbed"], gate=self.gate)

    async def start(self) -> None:
        self._task = asyncio.create_task(
            self._rig.stream(prompt="x", max_tokens=11, request_id="neighbour", priority=0)
        )
        await until(lambda: any(job.submit.request_id == "neighbour" for job in self._rig.fake.jobs))

    async def finish(self) -> None:
        for _ in range(11):
            self.gate.release()
        events = await self._task
        assert "".join(event["choices"][0]["text"] for event in events) == "undisturbed"


async def post(r: Rig, path: str, body: object) -> Any:  # noqa: ANN401 - parsed JSON
    """As a careless client would write it: NaN, Infinity and lone surrogates are sent as they are."""
    raw = json.dumps(body).encode()
    response = await r.http.post(path, content=raw, headers={"content-type": "application/json"})
    answer = response.json()
    assert set(answer) == {"error"} or response.status_code == 200, answer
    if response.status_code != 200:
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert len(response.content) < 4096, "an error does not repeat a megabyte of input"
    return response.status_code, answer


@pytest.mark.parametrize(
    ("path", "base", "table"),
    [
        ("/v1/completions", {"prompt": "x"}, COMPLETIONS),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, CHAT),
    ],
    ids=["completions", "chat"],
)
async def test_hostile_values(
    tmp_path: Path, path: str, base: dict[str, object], table: dict[str, list[object]]
) -> None:
    async with rig(tmp_path) as r:
        neighbour = Neighbour(r)
        r.fake.script = lambda _: neighbour.script
        await neighbour.start()
        for name, values in table.items():
            for value in values:
                status, answer = await post(r, path, {**base, name: value})
                shown = (name, str(value)[:80], answer)
                if name == "model" and isinstance(value, str):
                    assert status == 404, shown
                    continue
                assert status == 400, shown
                assert re.split(r"[\[.]", answer["error"]["param"] or "")[0] == name, shown
                assert answer["error"]["type"] == "invalid_request_error", shown
        assert len(r.fake.jobs) == 1, "nothing of it reached the scheduler"
        await neighbour.finish()
        await r.quiet()


async def test_neutral_values_of_unsupported_fields_are_accepted(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        assert (await r.complete(**NEUTRAL)).status_code == 200
        assert (await r.chat(**NEUTRAL_CHAT)).status_code == 200
        for name, value in NEUTRAL.items():
            assert (await r.complete(**{name: value})).status_code == 200, name


async def test_largest_allowed_values_are_accepted(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        response = await r.complete(
            n=limits.MAX_SEQUENCES,
            stop=["x" * limits.MAX_STOP_STRING_CHARS] * limits.MAX_STOP_STRINGS,
            stop_token_ids=[1] * limits.MAX_STOP_TOKEN_IDS,
            logit_bias={str(k): limits.MAX_LOGIT_BIAS for k in range(VOCAB_SIZE)},
            temperature=limits.MAX_TEMPERATURE,
            repetition_penalty=limits.MAX_REPETITION_PENALTY,
            seed=limits.INT64_MIN,
            priority=limits.INT32_MIN,
            expected_output_tokens=limits.UINT32_MAX,
            program="x" * limits.MAX_PROGRAM_CHARS,
            request_id="x" * limits.MAX_REQUEST_ID_CHARS,
            max_tokens=1,
        )
        assert response.status_code == 200
        assert len(r.fake.jobs) == limits.MAX_SEQUENCES
        many = await r.chat(messages=[{"role": "user", "content": ""}] * 60)
        assert many.status_code == 200


async def test_bodies_that_are_no_request(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        json_type = {"content-type": "application/json"}
        for body, headers in [
            (b"", json_type),
            (b"{", json_type),
            (b"null", json_type),
            (b"[]", json_type),
            (b'"x"', json_type),
            (b"\xff\xfe\x00", json_type),
            (b"[" * 100_000, json_type),
            (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, json_type),
            (b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}", json_type),
            (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", json_type),
            (b'{"prompt": "x"}', {"content-type": "text/plain"}),
            (b'{"prompt": "x"}', {}),
            (b"prompt=x", {"content-type": "application/x-www-form-urlencoded"}),
        ]:
            for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
                response = await r.http.post(path, content=body, headers=headers)
                assert response.status_code == 400, (path, body[:40])
                assert response.json()["error"]["type"] == "invalid_request_error"
        deep = {"chat_template_kwargs": json.loads('{"a":' * 300 + "1" + "}" * 300)}
        assert (await r.chat(**deep)).status_code in (200, 400)
        surrogate = await post(
            r, "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"quiet": "\ud800"}},
        )  # fmt: skip
        assert surrogate[0] == 200, "the template only asks whether it is set"


async def test_unknown_paths_and_methods_have_the_error_shape(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        missing = await r.http.get("/v1/embeddings")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
        method = await r.http.get("/v1/completions")
        assert (method.status_code, method.json()["error"]["code"]) == (405, "method_not_allowed")
        assert method.headers["allow"] == "POST"
        model = await r.http.get("/v1/models/other/model")
        assert (model.status_code, model.json()["error"]["code"]) == (404, "model_not_found")
        named = await r.complete(model="other")
        assert (named.status_code, named.json()["error"]["param"]) == (404, "model")


async def test_tokenize_values(tmp_path: Path) -> None:
    async with rig(tmp_path, max_prompt_bytes=1000) as r:
        for path, body in [
            ("/tokenize", {}),
            ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}),
            ("/tokenize", {"prompt": 5}),
            ("/tokenize", {"prompt": "x" * 1001}),
            ("/tokenize", {"prompt": "\ud800"}),
            ("/tokenize", {"prompt": "x", "extra": 1}),
            ("/detokenize", {}),
            ("/detokenize", {"tokens": [VOCAB_SIZE]}),
            ("/detokenize", {"tokens": [-1]}),
            ("/detokenize", {"tokens": [2**70]}),
            ("/detokenize", {"tokens": "x"}),
            ("/detokenize", {"tokens": ["x"] * 500_000}),
        ]:
            status, _ = await post(r, path, body)
            assert status == 400, (path, str(body)[:60])
        assert (await post(r, "/tokenize", {"prompt": "x", "model": "other"}))[0] == 404
        assert (await post(r, "/tokenize", {"prompt": ""}))[1]["tokens"] == []
        assert (await post(r, "/detokenize", {"tokens": []}))[1] == {"prompt": ""}


# --- gRPC

GRPC_CASES: dict[str, list[dict[str, Any]]] = {
    "prompt": [{}, {"text": ""}, {"token_ids": {"ids": []}}, {"token_ids": {"ids": [VOCAB_SIZE]}}],
    "request_id": [{"request_id": "a b"}, {"request_id": "x" * 129}],
    "temperature": [{"temperature": -1.0}, {"temperature": NAN}, {"temperature": INF}],
    "sampling.num_sequences": [{"sampling": {"num_sequences": 129}}, {"sampling": {"num_sequences": 2**32 - 1}}],
    "sampling.top_p": [{"sampling": {"top_p": 0.0}}, {"sampling": {"top_p": 1.5}}, {"sampling": {"top_p": NAN}}],
    "sampling.min_p": [{"sampling": {"min_p": -1.0}}, {"sampling": {"min_p": INF}}],
    "decoding.presence_penalty": [{"decoding": {"presence_penalty": 3.0}}],
    "decoding.frequency_penalty": [{"decoding": {"frequency_penalty": NAN}}],
    "decoding.repetition_penalty": [{"decoding": {"repetition_penalty": 0.0}}],
    "decoding.logit_bias": [
        {"decoding": {"logit_bias": {VOCAB_SIZE: 1.0}}},
        {"decoding": {"logit_bias": {1: NAN}}},
        {"decoding": {"logit_bias": dict.fromkeys(range(1025), 0.0)}},
    ],
    "stopping.max_new_tokens": [{"stopping": {"max_new_tokens": 0}}],
    "stopping.min_new_tokens": [{"stopping": {"min_new_tokens": 2**32 - 1}}],
    "stopping.stop_strings": [
        {"stopping": {"stop_strings": [""]}},
        {"stopping": {"stop_strings": ["x"] * 17}},
        {"stopping": {"stop_strings": ["x" * 2**20]}},
    ],
    "stopping.stop_token_ids": [
        {"stopping": {"stop_token_ids": [VOCAB_SIZE]}},
        {"stopping": {"stop_token_ids": [1] * 257}},
    ],
    "response.logprobs": [{"response": {"logprobs": 21}}],
}


async def test_hostile_values_over_grpc(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        neighbour = Neighbour(r)
        r.fake.script = lambda _: neighbour.script
        await neighbour.start()
        for name, cases in GRPC_CASES.items():
            for fields in cases:
                base = {} if name == "prompt" else {"text": "x"}
                request = inference_pb2.GenerateRequest(**{**base, **fields})
                for call in (r.stub.Generate(request), r.stub.GenerateStream(request)):
                    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT, (name, str(fields)[:80])
                    details = await call.details()
                    assert name in details, (name, details)
                    assert len(details) < 500
        unknown = r.stub.Generate(inference_pb2.GenerateRequest(text="x", model="other"))
        assert await unknown.code() is grpc.StatusCode.NOT_FOUND
        bad = r.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[VOCAB_SIZE]))
        assert await bad.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert len(r.fake.jobs) == 1
        await neighbour.finish()
        await r.quiet()


async def test_grpc_bytes_that_are_no_message(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        unary: Any = r.channel.unary_unary("/fastserve.v1.Inference/Generate")
        assert await unary(b"\xff\xff\xff").code() is grpc.StatusCode.INVALID_ARGUMENT
        stream: Any = r.channel.unary_stream("/fastserve.v1.Inference/GenerateStream")
        assert await stream(b"\xff\xff\xff").code() is grpc.StatusCode.INVALID_ARGUMENT
        ids = await r.stub.Tokenize(inference_pb2.TokenizeRequest(text="hello"))
        text = await r.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=ids.token_ids))
        assert text.text == "hello"
