"""Large bodies: parsed like small ones, and nobody waits for it."""

import asyncio
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from fastserve_common.errors import InvalidArgumentError
from fastserve_gateway.http import bodies
from fastserve_gateway.http.bodies import StepwiseDecoder

from .fake_scheduler import Script
from .rig import Rig, rig

numbers = st.lists(st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False), max_size=60)
values = st.recursive(
    st.none() | st.booleans() | st.text(max_size=5) | numbers,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=5),
    max_leaves=10,
)


@given(values, st.sampled_from([None, 1]), st.sampled_from([(",", ":"), (" , ", " : "), (",\n\t", ":\r\n")]))
def test_every_json_value_is_read_as_json_reads_it(
    value: object, indent: int | None, separators: tuple[str, str]
) -> None:
    text = json.dumps(value, indent=indent, separators=separators)
    assert StepwiseDecoder().decode(text) == json.loads(text) == value


@given(st.text('0123456789,,,[]-. "e', max_size=60), st.integers(0, 40))
def test_what_json_refuses_is_refused(tail: str, num_numbers: int) -> None:
    text = f"[{'7,' * num_numbers}{tail}]"
    try:
        expected = json.loads(text)
    except json.JSONDecodeError:
        with pytest.raises(json.JSONDecodeError):
            StepwiseDecoder().decode(text)
    else:
        assert StepwiseDecoder().decode(text) == expected


def test_containers_are_counted() -> None:
    text = "[" + "[]," * (bodies.MAX_CONTAINERS - 2) + "{}]"
    assert len(StepwiseDecoder().decode(text)) == bodies.MAX_CONTAINERS - 1
    with pytest.raises(InvalidArgumentError, match="more than 100000 lists and objects"):
        StepwiseDecoder().decode(f"[{text}]")


BIG_IDS = json.dumps({"prompt": [97] * 600_000}).encode()
BIG_TEXT = json.dumps({"prompt": "x" * 1_000_000}).encode()


async def post(r: Rig, body: bytes, path: str = "/v1/completions") -> tuple[int, dict[str, str]]:
    response = await r.http.post(path, content=body, headers={"content-type": "application/json"})
    return response.status_code, response.json().get("error", {})


async def _share_of_longest_wait(work: Callable[[bytes], object]) -> float:
    """While a thread works: the most of its processor time that passes between two turns of the loop, as a share.

    Processor time, so that other processes do not matter; 1: the loop stands still for all of it.
    """
    waits: list[float] = []

    def of_others() -> float:
        return time.process_time() - time.thread_time()

    async def tick() -> None:
        known = of_others()
        while True:
            await asyncio.sleep(0)
            now = of_others()
            waits.append(now - known)
            known = now

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0)
    await asyncio.to_thread(work, BIG_IDS)
    await asyncio.sleep(0)
    ticking.cancel()
    return max(waits) / sum(waits)


async def test_the_loop_runs_while_a_large_body_is_parsed() -> None:
    # The least of three: a thread that the system takes off its core for long keeps the loop from its turn, too.
    assert min([await _share_of_longest_wait(lambda body: bodies.parse(body, _Anything)) for _ in range(3)]) < 0.5
    assert await _share_of_longest_wait(json.loads) > 0.6, "the reason why it is not used"


class _Anything(BaseModel):
    prompt: object


async def test_health_is_answered_while_a_large_body_is_held_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, parse = threading.Event(), threading.Event(), bodies.parse

    def held_up(body: bytes, model: type[BaseModel]) -> BaseModel:
        begun.set()
        assert go_on.wait(30)
        return parse(body, model)

    monkeypatch.setattr(bodies, "parse", held_up)
    async with rig(tmp_path) as r:
        large = asyncio.create_task(post(r, BIG_IDS))
        assert await asyncio.to_thread(begun.wait, 30)
        for path in ("/health/live", "/health/ready", "/metrics"):
            assert (await r.http.get(path)).status_code == 200
        assert (await r.complete(max_tokens=2)).status_code == 200
        assert not large.done()
        go_on.set()
        status, error = await large
        assert (status, error["code"]) == (400, "context_length_exceeded")


async def test_large_bodies_get_the_answers_of_small_ones(tmp_path: Path) -> None:
    pad = " " * bodies.LARGE_BODY_BYTES
    async with rig(tmp_path, Script(ids=[*b"ab"])) as r:
        for body, status, code, param in (
            ({"prompt": "x", "max_tokens": 2}, 200, None, None),
            ({"prompt": [97] * 998, "max_tokens": 2}, 200, None, None),
            ({"prompt": [97] * 1000}, 400, "context_length_exceeded", "prompt"),
            ({"prompt": [97, 98, "c"]}, 400, "invalid_value", "prompt"),
            ({"prompt": [97, 5000]}, 400, "invalid_value", "prompt"),
            ({"prompt": "x", "tools": [{}]}, 400, "invalid_value", "tools"),
            ({"prompt": "x", "temperature": "hot"}, 400, "invalid_value", "temperature"),
            ({"max_tokens": 1}, 400, "invalid_value", "prompt"),
            ([1], 400, "invalid_value", None),
        ):
            text = json.dumps(body).encode()
            small, large = await post(r, text), await post(r, text + pad.encode())
            assert (small[0], small[1].get("code"), small[1].get("param")) == (status, code, param), body
            assert large == small
        for broken in (b'{"prompt": ', b'{"prompt": "\xff"}', b"[" * 5000, b'{"prompt": [1,2,]}'):
            small, large = await post(r, broken), await post(r, broken + pad.encode())
            assert small[0] == large[0] == 400
        for path in ("/v1/chat/completions", "/tokenize", "/detokenize"):
            assert (await post(r, BIG_TEXT, path))[0] == (200 if path == "/tokenize" else 400)
        await r.quiet()
