"""Stop strings end to end: no part of one reaches a client, the scheduler is told, nothing after it is billed."""

import asyncio
from pathlib import Path

import pytest

from fastserve.v1 import inference_pb2
from fastserve_gateway.engine.events import Delta, FinishReason
from fastserve_gateway.request import RequestFields

from .fake_scheduler import STOP_STRING, Script
from .models import END, ids_of
from .rig import rig, until

FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"

#: name: (answer, stops, shown, stop, tokens billed)
CASES: dict[str, tuple[str, list[str], str, str | None, int]] = {
    "one token": ("abXcd", ["X"], "ab", "X", 3),
    "three tokens": ("abXYZcd", ["XYZ"], "ab", "XYZ", 5),
    "five tokens": ("abVWXYZcd", ["VWXYZ"], "ab", "VWXYZ", 7),
    "overlapping prefixes": ("xxabcd", ["abc", "ab"], "xx", "ab", 4),
    "false start": ("aXXYb", ["XY"], "aX", "XY", 4),
    "in a run": ("aaaaab", ["aab"], "aaa", "aab", 6),
    "at once": ("XYab", ["XY"], "", "XY", 2),
    "multibyte": ("\u4f60\u597d\u4e16", ["\u597d"], "\u4f60", "\u597d", 6),
    "inside a family": (f"a{FAMILY}b", ["\u200d\U0001f469"], "a\U0001f468", "\u200d\U0001f469", 12),
    "combining mark": ("ae\u0301b", ["\u0301"], "ae", "\u0301", 4),
    "thai": ("\u0e2a\u0e27\u0e31\u0e2a", ["\u0e27\u0e31"], "\u0e2a", "\u0e27\u0e31", 9),
    "never comes": ("abXYcd", ["XYZ"], "abXYcd", None, 6),
    "half of it at the end": ("abXY", ["XYZ"], "abXY", None, 4),
}


@pytest.mark.parametrize("chunk", [1, 2, 50])
@pytest.mark.parametrize("include", [False, True])
async def test_stop_strings(tmp_path: Path, chunk: int, include: bool) -> None:
    script = Script()
    async with rig(tmp_path, lambda _: script) as r:
        for name, (answer, stops, shown, stop, tokens) in CASES.items():
            script.ids, script.chunk = [*ids_of(answer)], chunk
            expected = shown + (stop or "") if include else shown
            length = max(tokens, len(script.ids))
            body = {"stop": stops, "include_stop_str_in_output": include, "max_tokens": length, "prompt": "x"}
            whole = (await r.complete(**body)).json()
            assert whole["choices"][0]["text"] == expected, name
            assert whole["choices"][0]["stop_reason"] == stop, name
            assert whole["usage"]["completion_tokens"] == tokens, name
            events = await r.stream(**body, stream_options={"include_usage": True})
            texts = [event["choices"][0]["text"] for event in events[:-1]]
            assert "".join(texts) == expected, name
            assert not any("\ufffd" in text for text in texts), name
            assert events[-1]["usage"] == whole["usage"], name
            request = inference_pb2.GenerateRequest(text="x")
            request.stopping.stop_strings.extend(stops)
            request.stopping.include_stop_strings = include
            request.stopping.max_new_tokens = length
            pieces = [piece async for piece in r.stub.GenerateStream(request)]
            outputs = [output for piece in pieces for output in piece.outputs]
            assert "".join(output.text for output in outputs) == expected, name
            assert outputs[-1].finish_info.stop_string == (stop or ""), name
            assert pieces[-1].usage.completion_tokens == tokens == sum(len(o.token_ids) for o in outputs), name
        await r.quiet()


async def test_scheduler_is_told_once_and_held_text_is_never_shown(tmp_path: Path) -> None:
    gate = asyncio.Semaphore(0)
    script = Script(ids=ids_of("ab\u4f60STOPmore"), gate=gate, endless=True)
    async with rig(tmp_path, script) as r:
        body = {"prompt": "x", "stream": True, "stop": "STOP", "max_tokens": 500}
        task = asyncio.create_task(r.http.post("/v1/completions", json=body))
        for _ in range(5):
            gate.release()
        await until(lambda: bool(r.fake.jobs) and r.fake.jobs[0].sent == 5)
        for _ in range(4):
            gate.release()
        raw = (await task).text
        (job,) = r.fake.jobs
        await until(lambda: job.cancelled is not None)
        assert job.cancelled == STOP_STRING
        assert job.sent == 9, "nothing was generated behind the stop string"
        assert "ST" not in raw.replace('"stop_reason":"STOP"', "")
        await r.quiet()


async def test_stop_completed_by_the_last_incomplete_character(tmp_path: Path) -> None:
    """Bytes that never become a character show as U+FFFD at the end, in streams as in whole answers."""
    async with rig(tmp_path, Script(ids=[97, *ids_of("\u4f60")[:2], END])) as r:
        whole = (await r.complete()).json()
        assert whole["choices"][0]["text"] == "a\ufffd"
        events = await r.stream(prompt="x")
        assert [event["choices"][0]["text"] for event in events] == ["a", "\ufffd"]
        stopped = (await r.complete(stop="\ufffd")).json()["choices"][0]
        assert (stopped["text"], stopped["finish_reason"], stopped["stop_reason"]) == ("a", "stop", "\ufffd")


async def test_prompt_cut_in_mid_character(tmp_path: Path) -> None:
    head, tail = ids_of("\u4f60")[:2], ids_of("\u4f60")[2:]
    async with rig(tmp_path, Script(ids=[*tail, 33])) as r:
        prompt = [*ids_of("secret "), *head]
        answer = (await r.complete(prompt=prompt, max_tokens=2)).json()["choices"][0]["text"]
        assert answer == "\u4f60!"
        echoed = (await r.complete(prompt=prompt, max_tokens=2, echo=True)).json()["choices"][0]["text"]
        assert echoed == "secret \u4f60!"
        events = await r.stream(prompt=prompt, max_tokens=2)
        assert events[0]["choices"][0]["text"] == "\u4f60"


@pytest.mark.parametrize("n", [1, 3])
async def test_what_came_behind_a_stop_string_is_no_news(tmp_path: Path, n: int) -> None:
    """A reader that looks only when everything has arrived: the answers end, and nothing is waited for."""
    async with rig(tmp_path, Script(ids=ids_of("abXcd"))) as r:
        engine = r.gateway.engine
        request = await engine.build(RequestFields(prompts=["x"], n=n, max_tokens=5, stop=["X"]))
        deltas: list[Delta] = []
        async with engine.open(request) as session, asyncio.timeout(15):
            await until(lambda: len(session._inbox) == 6 * n)
            while not session.done():
                delta = await session.next()
                assert delta is not None
                deltas.append(delta)
        texts = ["".join(delta.text for delta in deltas if delta.index == k) for k in range(n)]
        assert texts == ["ab"] * n
        assert sum(delta.finish is not None for delta in deltas) == n
        assert session.usage.completion_tokens == 3 * n
        assert session._buffered_tokens == 0
        await r.quiet()


async def test_abort_of_an_answer_whose_end_has_not_been_read(tmp_path: Path) -> None:
    async with rig(tmp_path, Script(ids=ids_of("ab"))) as r:
        engine = r.gateway.engine
        request = await engine.build(RequestFields(prompts=["x"], max_tokens=2))
        async with engine.open(request) as session, asyncio.timeout(15):
            await until(lambda: len(session._inbox) == 3)
            session.abort()
            finishes = []
            while not session.done():
                delta = await session.next()
                finishes += [delta.finish.reason] if delta is not None and delta.finish is not None else []
        assert finishes == [FinishReason.LENGTH]
        await r.quiet()
