"""What one key may ask for in a minute holds over all gateways, and falls away while the state store does."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from fastserve.v1 import inference_pb2
from fastserve_common.buckets import Draw, Drawn
from fastserve_common.errors import RETRY_AFTER_METADATA
from fastserve_common.state import StateError
from fastserve_gateway import shared
from fastserve_gateway.metrics import Metrics
from fastserve_gateway.quota import Quotas
from fastserve_gateway.server import running
from fastserve_gateway.shared import PAUSE_S, SharedCounts

from .rig import Rig, rig

KEY, OTHER = "fsk-0123456789abcdefghij", "fsk-another-0123456789ab"


@contextlib.asynccontextmanager
async def second_gateway(first: Rig) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        running(first.settings) as gateway,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.http_port}", timeout=30) as http,
    ):
        async with asyncio.timeout(30):
            while gateway.engine.not_ready() is not None:  # noqa: ASYNC110 - the link's task makes it true
                await asyncio.sleep(0.01)
        yield http


async def complete(http: httpx.AsyncClient, key: str = KEY, **body: object) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 4, **body}, headers=headers)


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
async def test_two_gateways_share_the_requests_of_a_key(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    state = {"state": request.getfixturevalue("redis_url")} if kind == "redis" else {}
    async with (
        rig(tmp_path, api_key=(KEY, OTHER), rate_limit_requests_per_min=2, **state) as r,
        second_gateway(r) as second,
    ):
        one, two = await complete(r.http), await complete(second)
        assert (one.status_code, two.status_code) == (200, 200)
        assert one.headers["x-ratelimit-limit-requests"] == "2"
        assert one.headers["x-ratelimit-remaining-requests"] == "1"
        assert 0 < float(two.headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 60
        for http in (r.http, second):
            refused = await complete(http)
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
            assert "2 requests a minute (--rate-limit-requests-per-min)" in refused.json()["error"]["message"]
            assert 1 <= int(refused.headers["retry-after"]) <= 31
            assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert r.metric("admission_rejections_total", reason="rate_limit") == 1
        assert (await complete(second, OTHER)).status_code == 200, "another key has its own"
        assert len(r.fake.jobs) == 3, "no scheduler heard of what was refused"


async def test_tokens_are_those_of_the_prompt_and_the_longest_answers(tmp_path: Path) -> None:
    async with rig(tmp_path, rate_limit_tokens_per_min=100) as r:
        body = {"prompt": [97] * 10, "max_tokens": 20, "n": 2}
        first = await r.complete(**body)
        assert first.headers["x-ratelimit-limit-tokens"] == "100"
        assert first.headers["x-ratelimit-remaining-tokens"] == "50"
        assert "x-ratelimit-limit-requests" not in first.headers
        assert (await r.complete(temperature=-1)).status_code == 400
        assert (await r.complete(**body, stream=True)).headers["x-ratelimit-remaining-tokens"] in ("0", "1", "2", "3")
        refused = await r.complete(**body)
        assert refused.status_code == 429
        assert "100 tokens a minute" in refused.json()["error"]["message"]


async def test_a_request_above_a_minutes_tokens_costs_a_minute(tmp_path: Path) -> None:
    async with rig(tmp_path, rate_limit_tokens_per_min=10) as r:
        assert (await r.complete(max_tokens=50)).status_code == 200
        assert (await r.complete(max_tokens=50)).status_code == 429


async def test_grpc_draws_from_the_same_bucket_and_says_when_to_come_back(tmp_path: Path) -> None:
    async with rig(tmp_path, api_key=(KEY,), rate_limit_requests_per_min=1) as r:
        assert (await complete(r.http)).status_code == 200
        request = inference_pb2.GenerateRequest(text="x")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await r.stub.Generate(request, metadata=(("authorization", f"Bearer {KEY}"),))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        hints = dict(refused.value.trailing_metadata() or ())
        assert 0 < int(hints[RETRY_AFTER_METADATA]) <= 61_000


async def test_without_limits_the_store_is_not_asked(tmp_path: Path) -> None:
    quotas = Quotas(SharedCounts(Deaf()), Metrics("m"), requests_per_min=0, tokens_per_min=0)
    assert await quotas.take(5) is None
    async with rig(tmp_path) as r:
        assert not [name for name in (await r.complete()).headers if name.startswith("x-ratelimit")]


class Deaf:
    """A store that is away, or keeps its callers waiting."""

    def __init__(self, error: StateError | None = None) -> None:
        self.asked = 0
        self._error = error

    async def draw(self, owner: str, draws: Sequence[Draw]) -> Drawn:
        self.asked += 1
        if self._error is not None:
            raise self._error
        await asyncio.Event().wait()
        raise AssertionError

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - the rest of a store, which nobody may use here
        raise AssertionError(name)


@pytest.mark.parametrize("error", [StateError("connection refused"), None])
async def test_while_the_store_is_away_everybody_is_let_through(
    error: StateError | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "ASK_TIMEOUT_S", 0.01)
    now_s = 100.0
    store, metrics = Deaf(error), Metrics("m")
    quotas = Quotas(SharedCounts(store, lambda: now_s), metrics, requests_per_min=1, tokens_per_min=1)
    for _ in range(3):
        assert await quotas.take(5) is None
    assert store.asked == 1, "a store that is away is not waited for by every request"
    assert caplog.text.count("rate limits are not checked") == 1
    assert metrics.registry.get_sample_value("fastserve:rate_limit_unchecked_total", {"model_name": "m"}) == 3
    now_s += PAUSE_S
    await quotas.take(5)
    assert store.asked == 2
