"""The API as the `openai` package sees it, and field by field."""

from pathlib import Path

import openai
import pytest

from fastserve.v1 import sampling_pb2, scheduler_pb2

from .fake_scheduler import Script
from .models import END, MERGED_HE, PAD, ids_of
from .rig import MODEL, rig, until


def logprobs_of(token_id: int) -> sampling_pb2.TokenLogprobs:
    top = [sampling_pb2.TopLogprob(token_id=t, logprob=-0.5 * (k + 1)) for k, t in enumerate((token_id, 0xE4, 66))]
    return sampling_pb2.TokenLogprobs(token_id=token_id, logprob=-0.5, top=top)


async def test_openai_package_end_to_end(tmp_path: Path) -> None:
    script = Script(ids=[*ids_of("\u4f60 \U0001f468\u200d\U0001f469 ok"), END])
    async with rig(tmp_path, script) as r, r.openai() as client:
        models = await client.models.list()
        assert [model.id for model in models.data] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL
        whole = await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
        assert whole.choices[0].message.content == "\u4f60 \U0001f468\u200d\U0001f469 ok"
        assert whole.choices[0].finish_reason == "stop"
        assert whole.usage is not None
        assert whole.usage.completion_tokens == len(script.ids)
        history = [whole.choices[0].message.model_dump(), {"role": "user", "content": "and?"}]
        again = await r.chat(messages=history)
        assert again.status_code == 200, "an earlier answer can be handed back as the package dumps it"
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        content = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        assert "".join(content) == whole.choices[0].message.content
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].usage == whole.usage
        assert all(chunk.usage is None for chunk in chunks[:-1])
        assert len({chunk.id for chunk in chunks}) == 1
        completion = await client.completions.create(model=MODEL, prompt="x", max_tokens=3, seed=7, temperature=0)
        assert completion.choices[0].text == "\u4f60"
        assert completion.choices[0].finish_reason == "length"
        with pytest.raises(openai.NotFoundError) as missing:
            await client.completions.create(model="other", prompt="x")
        assert missing.value.code == "model_not_found"
        await r.quiet()


async def test_prompt_forms_echo_and_n(tmp_path: Path) -> None:
    async with rig(tmp_path, Script(ids=ids_of("ab"))) as r:
        for prompt, texts in {
            "x": ["xab"],
            ("x", "\u4f60"): ["xab", "\u4f60ab"],
            (104, MERGED_HE): ["hheab"],
            ((65,), (66, 67)): ["Aab", "BCab"],
        }.items():
            body = prompt if isinstance(prompt, str) else [list(p) if isinstance(p, tuple) else p for p in prompt]
            answer = (await r.complete(prompt=body, echo=True, n=2, max_tokens=2)).json()
            assert [choice["text"] for choice in answer["choices"]] == [text for text in texts for _ in range(2)]
            assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(texts)))
            events = await r.stream(prompt=body, echo=True, n=2, max_tokens=2)
            streamed = [""] * (2 * len(texts))
            for event in events:
                (choice,) = event["choices"]
                streamed[choice["index"]] += choice["text"]
            assert streamed == [text for text in texts for _ in range(2)]
            assert answer["usage"]["completion_tokens"] == 2 * 2 * len(texts)
        await r.quiet()


async def test_answers_of_n_differ_by_seed_and_repeat_with_it(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        await r.complete(n=3, seed=2**63 - 1, request_id="first")
        seeds = sorted(job.submit.sampling.seed for job in r.fake.jobs)
        assert seeds == [-(2**63), -(2**63) + 1, 2**63 - 1], "seed + i wraps within int64"
        assert sorted(job.submit.request_id for job in r.fake.jobs) == ["first#0", "first#1", "first#2"]
        await r.complete()
        await r.complete()
        one, two = (job.submit.sampling.seed for job in r.fake.jobs[-2:])
        assert one != two, "without a seed answers differ"


async def test_a_seeded_gateway_repeats_the_seeds_it_draws(tmp_path: Path) -> None:
    drawn = []
    for folder in ("a", "b"):
        async with rig(tmp_path / folder, seed=7) as r:
            await r.complete()
            await r.complete()
            drawn.append([job.submit.sampling.seed for job in r.fake.jobs])
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 2


async def test_everything_reaches_the_scheduler(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        body = {
            "max_tokens": 9, "min_tokens": 2, "temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125,
            "presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 1.5, "logit_bias": {"65": -100},
            "stop_token_ids": [7], "priority": -3, "seed": 11, "logprobs": 4, "request_id": "mine",
            "expected_output_tokens": 5, "program": "agent 7",
        }  # fmt: skip
        response = await r.complete(**body)
        assert response.status_code == 200
        assert response.headers["x-request-id"] == "mine"
        assert response.json()["id"] == "cmpl-mine"
        submit = r.fake.job("mine").submit
        assert (submit.max_tokens, submit.min_tokens, submit.priority) == (9, 2, -3)
        assert (submit.expected_output_tokens, submit.program) == (5, "agent 7")
        assert sorted(submit.stop_token_ids) == [7, END, PAD]
        expected = sampling_pb2.SamplingParams(
            temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, presence_penalty=-2, frequency_penalty=2,
            repetition_penalty=1.5, logit_bias={65: -100}, seed=11, logprobs=4,
        )  # fmt: skip
        assert submit.sampling == expected
        await r.complete(ignore_eos=True, request_id="plain", top_k=-1)
        submit = r.fake.job("plain").submit
        assert list(submit.stop_token_ids) == []
        assert submit.max_tokens == 16, "the OpenAI default of /v1/completions"
        assert (submit.sampling.temperature, submit.sampling.top_p, submit.sampling.top_k) == (1.0, 1.0, 0)
        assert submit.sampling.repetition_penalty == 1.0
        assert not submit.sampling.HasField("logprobs")
        await r.chat(request_id="chat")
        submit = r.fake.job("chat").submit
        assert submit.max_tokens == 1000 - len(r.fake.job("chat").prompt), "chat: whatever fits"


async def test_logprobs_of_completions(tmp_path: Path) -> None:
    script = Script(ids=[*ids_of("a\u4f60"), END], logprobs=logprobs_of)
    async with rig(tmp_path, script) as r:
        choice = (await r.complete(logprobs=2)).json()["choices"][0]
        assert choice["logprobs"]["tokens"] == ["a", r"bytes:\xe4", r"bytes:\xbd", r"bytes:\xa0", "<|end|>"]
        assert choice["logprobs"]["text_offset"] == [0, 1, 1, 1, 2]
        assert choice["logprobs"]["token_logprobs"] == [-0.5] * 5
        assert choice["logprobs"]["top_logprobs"][0] == {"a": -0.5, r"bytes:\xe4": -1.0, "B": -1.5}
        events = await r.stream(prompt="x", logprobs=2)
        tokens = [t for e in events if e["choices"][0]["logprobs"] for t in e["choices"][0]["logprobs"]["tokens"]]
        assert tokens == choice["logprobs"]["tokens"]
        assert "".join(e["choices"][0]["text"] for e in events) == choice["text"]


async def test_logprobs_of_chat(tmp_path: Path) -> None:
    script = Script(ids=[*ids_of("\u4f60"), END], logprobs=logprobs_of)
    async with rig(tmp_path, script) as r, r.openai() as client:
        answer = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}], logprobs=True, top_logprobs=2
        )
        assert answer.choices[0].logprobs is not None
        entries = answer.choices[0].logprobs.content or []
        assert bytes(b for entry in entries[:3] for b in entry.bytes or []).decode() == "\u4f60"
        assert [len(entry.top_logprobs) for entry in entries] == [2, 2, 2, 2]
        bare = (await r.chat(logprobs=True)).json()["choices"][0]["logprobs"]["content"]
        assert [entry["top_logprobs"] for entry in bare] == [[], [], [], []]


async def test_finish_and_stop_reasons(tmp_path: Path) -> None:
    async with rig(tmp_path, Script(ids=[*ids_of("abcd"), END, 65])) as r:
        cases: list[tuple[dict[str, object], str, object, str, int]] = [
            ({}, "stop", None, "abcd", 5),
            ({"max_tokens": 2}, "length", None, "ab", 2),
            ({"stop": "c"}, "stop", "c", "ab", 3),
            ({"stop": ["zz", "bc"], "include_stop_str_in_output": True}, "stop", "bc", "abc", 3),
            ({"stop_token_ids": [99]}, "stop", 99, "ab", 3),
            ({"stop_token_ids": [99], "include_stop_str_in_output": True}, "stop", 99, "abc", 3),
            ({"ignore_eos": True, "max_tokens": 6}, "length", None, "abcdA", 6),
            ({"stop": "b", "min_tokens": 2, "max_tokens": 3}, "length", None, "abc", 3),
        ]
        for body, reason, stop, text, tokens in cases:
            answer = (await r.complete(**body)).json()
            choice = answer["choices"][0]
            assert (choice["finish_reason"], choice["stop_reason"], choice["text"]) == (reason, stop, text), body
            assert answer["usage"]["completion_tokens"] == tokens, body
        await r.quiet()


async def test_usage_on_every_event_when_asked(tmp_path: Path) -> None:
    async with rig(tmp_path, Script(ids=ids_of("abc"))) as r:
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = await r.stream(prompt="xy", max_tokens=3, stream_options=options)
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts[:3] == [1, 2, 3]
        assert events[-1]["choices"] == []
        assert events[-1]["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}


async def test_tokenize_and_detokenize(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        body = {"prompt": "hello \u4f60", "return_token_strs": True}
        answer = (await r.http.post("/tokenize", json=body)).json()
        assert answer["tokens"] == [MERGED_HE, 257, 111, 32, *ids_of("\u4f60")]
        assert answer["count"] == 7
        assert answer["max_model_len"] == 1000
        assert answer["token_strs"][:2] == ["he", "ll"]
        back = (await r.http.post("/detokenize", json={"tokens": [*answer["tokens"], END]})).json()
        assert back == {"prompt": "hello \u4f60<|end|>"}
        messages = [{"role": "user", "content": "x"}]
        chat = (await r.http.post("/tokenize", json={"messages": messages})).json()
        await r.chat(request_id="same")
        assert chat["tokens"] == r.fake.job("same").prompt
        quiet = {"messages": messages, "chat_template_kwargs": {"quiet": True}}
        assert (await r.http.post("/tokenize", json=quiet)).json()["count"] == chat["count"] + 3


async def test_broken_and_failing_schedulers_are_errors_not_hangs(tmp_path: Path) -> None:
    scripts = {
        "skew": Script(ids=ids_of("ab"), skew=1, finish=None),
        "error": Script(ids=ids_of("ab"), finish=scheduler_pb2.STOP_REASON_ERROR),
        "withheld": Script(ids=ids_of("ab"), logprobs=None),
    }
    async with rig(tmp_path, lambda submit: scripts[submit.request_id]) as r:
        for request_id in scripts:
            response = await r.complete(request_id=request_id, logprobs=1)
            assert response.status_code == 500
            assert response.json()["error"]["type"] == "internal_error"
        await until(lambda: r.fake.job("skew").cancelled is not None)
        events = await r.stream(prompt="x", request_id="error")
        assert events[-1]["error"]["code"] == "internal"
        await r.quiet()
        assert r.outcomes() == {"error": 4}
