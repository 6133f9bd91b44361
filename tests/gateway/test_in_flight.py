"""How many answers of one key are in progress at once is counted over all gateways, also when one of them dies."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from fastserve.v1 import inference_pb2
from fastserve_common.state import Occupied, SqliteState, StateError, StateStore
from fastserve_gateway import in_flight, shared
from fastserve_gateway.in_flight import InFlight, TooManyInFlightError
from fastserve_gateway.metrics import Metrics
from fastserve_gateway.server import running
from fastserve_gateway.shared import SharedCounts

from .fake_scheduler import Script
from .rig import Rig, rig, until
from .test_quota import KEY, OTHER, complete, second_gateway

LIMIT = 2


def endless() -> tuple[Script, asyncio.Semaphore]:
    """Answers that end when the gate has been opened for each."""
    gate = asyncio.Semaphore(0)
    return Script(ids=list(b"hello"), gate=gate), gate


async def taken(store: StateStore, owner: str = "") -> int:
    return (await store.occupy(owner, "somebody who looks", 0, 0, 1, 60)).taken


async def until_taken(store: StateStore, num_places: int, owner: str = "") -> None:
    async with asyncio.timeout(30):
        while await taken(store, owner) != num_places:  # noqa: ASYNC110 - the store tells nobody
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
async def test_gateways_count_the_answers_of_a_key_together(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    state = {"state": request.getfixturevalue("redis_url")} if kind == "redis" else {}
    script, gate = endless()
    async with (
        rig(tmp_path, script, api_key=(KEY, OTHER), max_concurrent_requests_per_key=LIMIT, **state) as r,
        second_gateway(r) as second,
    ):
        begun = [asyncio.create_task(complete(http)) for http in (r.http, second)]
        await until(lambda: len(r.fake.jobs) == LIMIT)
        for http in (r.http, second):
            for stream in (False, True):
                refused = await complete(http, stream=stream)
                assert refused.status_code == 429
                assert refused.json()["error"]["code"] == "rate_limit_exceeded"
                assert "2 answers of this key" in refused.json()["error"]["message"]
                assert int(refused.headers["retry-after"]) >= 1
        with pytest.raises(grpc.aio.AioRpcError) as said:
            await r.stub.Generate(
                inference_pb2.GenerateRequest(text="x"), metadata=(("authorization", f"Bearer {KEY}"),)
            )
        assert said.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert r.metric("admission_rejections_total", reason="max_concurrent_requests_per_key") == 3
        other = asyncio.create_task(complete(second, OTHER))
        await until(lambda: len(r.fake.jobs) == LIMIT + 1)
        for _ in range(100):
            gate.release()
        assert [(await answer).status_code for answer in (*begun, other)] == [200] * 3
        assert len(r.fake.jobs) == LIMIT + 1, "no scheduler heard of what was refused"
        await until_granted(second)


async def until_granted(http: Any) -> None:  # noqa: ANN401 - a client
    """What was given back is told at once, by a task of the other gateway."""
    async with asyncio.timeout(30):
        while (await complete(http)).status_code != 200:  # noqa: ASYNC110 - another gateway's news
            await asyncio.sleep(0.005)


async def test_answers_that_end_in_any_way_are_given_back(tmp_path: Path) -> None:
    script, _ = endless()
    async with rig(tmp_path, script, max_concurrent_requests_per_key=8) as r:
        aborted = asyncio.create_task(r.complete(n=2, request_id="a"))
        left = asyncio.create_task(r.complete())
        call = r.stub.Generate(inference_pb2.GenerateRequest(text="x"))
        waiting = asyncio.ensure_future(call)
        await until(lambda: len(r.fake.jobs) == 4)
        await until_taken(r.store, 4)
        assert r.gateway.engine.abort("a")
        await aborted
        left.cancel()
        call.cancel()
        await asyncio.gather(left, waiting, return_exceptions=True)
        await until_taken(r.store, 0)
        await r.quiet()


async def test_a_request_of_more_answers_than_the_limit_has_them_all(tmp_path: Path) -> None:
    script, gate = endless()
    async with rig(tmp_path, script, max_concurrent_requests_per_key=LIMIT) as r:
        large = asyncio.create_task(r.complete(n=5, max_tokens=1))
        await until(lambda: len(r.fake.jobs) == 5)
        assert (await r.complete()).status_code == 429
        for _ in range(100):
            gate.release()
        assert (await large).status_code == 200
        await until_taken(r.store, 0)


async def test_without_a_limit_the_store_is_not_asked(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        assert (await r.complete()).status_code == 200
        assert r.gateway.engine._in_flight._owners == {}


async def test_a_gateway_that_ends_gives_its_places_back(tmp_path: Path) -> None:
    script, _ = endless()
    async with rig(tmp_path, script, max_concurrent_requests_per_key=LIMIT) as r:
        async with running(r.settings) as gateway:
            await until(lambda: gateway.engine.not_ready() is None)
            http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.http_port}", timeout=30)
            cut_off = asyncio.create_task(complete(http))
            await until(lambda: len(r.fake.jobs) == 1)
        assert (await cut_off).status_code == 503
        assert await taken(r.store) == 0
        await http.aclose()


async def test_what_a_gateway_holds_is_said_again_before_it_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_flight, "RENEW_S", 0.02)
    script, _ = endless()
    async with rig(tmp_path, script, max_concurrent_requests_per_key=LIMIT) as r:
        begun = asyncio.create_task(r.complete())
        await until(lambda: len(r.fake.jobs) == 1)
        holder = (await _holder(r))[0]
        await r.store.occupy("", holder, 0, 0, LIMIT, 60)  # as a store that was wiped
        await until_taken(r.store, 1)
        await r.store.occupy("", "died", 0, LIMIT - 1, LIMIT, 0.05)
        await until_taken(r.store, 1)
        begun.cancel()
        await asyncio.gather(begun, return_exceptions=True)
        await until_taken(r.store, 0)


async def _holder(r: Rig) -> list[str]:
    return list(await r.store.members("gateway"))


async def test_a_scheduler_that_is_lost_while_places_are_asked_for_is_said_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    occupy, asked, go_on = SqliteState.occupy, asyncio.Event(), asyncio.Event()

    async def slowly(*args: Any) -> Occupied:  # noqa: ANN401 - passed on
        asked.set()
        await go_on.wait()
        return await occupy(*args)

    async with rig(tmp_path, max_concurrent_requests_per_key=LIMIT) as r:
        monkeypatch.setattr(SqliteState, "occupy", slowly)
        answer = asyncio.create_task(r.complete())
        await asyncio.wait_for(asked.wait(), 30)
        await r.fake.stop()
        await until(lambda: not r.gateway.engine.view.connected)
        go_on.set()
        assert (await answer).status_code == 503
        assert not r.fake.jobs
        await until_taken(r.store, 0)


class Store:
    """One that can be away, or keep its callers waiting."""

    def __init__(self) -> None:
        self.problem: StateError | None = None
        self.silent = False
        self.said: list[tuple[int, int]] = []

    async def occupy(self, owner: str, holder: str, held: int, more: int, limit: int, ttl_s: float) -> Occupied:
        self.said.append((held, more))
        if self.problem is not None:
            raise self.problem
        if self.silent:
            await asyncio.Event().wait()
        return Occupied(True, held + more)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - the rest of a store, which nobody may use here
        raise AssertionError(name)


@pytest.mark.parametrize("silent", [False, True])
async def test_while_the_store_is_away_a_gateway_counts_its_own(silent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "ASK_TIMEOUT_S", 0.01)
    now_s = 100.0
    store, metrics = Store(), Metrics("m")
    store.silent, store.problem = silent, None if silent else StateError("refused")
    flights = InFlight(SharedCounts(store, lambda: now_s), metrics, "gw", limit=LIMIT)
    places = [flights.places(1) for _ in range(LIMIT + 1)]
    for place in places[:LIMIT]:
        await place.take()
    with pytest.raises(TooManyInFlightError):
        await places[LIMIT].take()
    assert len(store.said) == 1, "a store that is away is not waited for by every request"
    assert metrics.registry.get_sample_value("fastserve:rate_limit_unchecked_total", {"model_name": "m"}) == LIMIT
    places[0].give_back()
    places[0].give_back()
    await flights.tell()
    store.silent, store.problem = False, None
    now_s += shared.PAUSE_S
    await places[LIMIT].take()
    assert store.said[-1] == (1, 1)
    places[1].give_back()
    await flights.tell()
    assert store.said[-1] == (1, 0), "what could not be said is said with the next news"


async def test_places_asked_for_by_a_caller_who_left_are_not_kept() -> None:
    store = Store()
    store.silent = True
    flights = InFlight(SharedCounts(store), Metrics("m"), "gw", limit=LIMIT)
    place = flights.places(1)
    asking = asyncio.create_task(place.take())
    await until(lambda: bool(store.said))
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    place.give_back()
    store.silent = False
    await flights.tell()
    assert store.said[-1] == (0, 0)
