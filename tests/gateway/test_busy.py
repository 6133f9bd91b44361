"""Liveness is answered while the gateway has much to do: not after it."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from fastserve_gateway import server

from .rig import MODEL, Rig, rig

MIB = 1024 * 1024


async def probes_answered_during(r: Rig, work: "asyncio.Future[Any]") -> int:
    """How many times /health/live was answered while `work` was not done."""
    count = 0
    while not work.done():
        assert (await r.http.get("/health/live")).status_code == 200
        count += not work.done()
    return count


@pytest.mark.timeout(300)
async def test_liveness_is_answered_during_a_prompt_of_20_megabytes(tmp_path: Path) -> None:
    """The prompt is longer than the model can take, which is known only when it has been read."""
    prompt = "hello world " * (20 * MIB // 12)
    async with rig(tmp_path, max_body_bytes=32 * MIB, max_prompt_bytes=32 * MIB) as r:
        r.http.timeout = httpx.Timeout(240)
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
        work = asyncio.gather(r.http.post("/v1/completions", json=body))
        answered = await probes_answered_during(r, work)
        assert [response.status_code for response in await work] == [400]
        assert answered > 0


async def test_liveness_is_answered_during_a_burst(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        r.http.timeout = httpx.Timeout(100)
        work = asyncio.gather(*(r.complete(model=MODEL, prompt=f"hello {n}", max_tokens=5) for n in range(300)))
        answered = await probes_answered_during(r, work)
        assert {response.status_code for response in await work} == {200}
        assert answered > 0
        await r.quiet()


async def test_an_idle_connection_is_kept_for_longer_than_load_balancers_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They keep theirs for 60 s: a request must never meet a connection that we have closed."""
    assert server.KEEP_ALIVE_S > 60
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 1)
    async with rig(tmp_path) as r:
        url = r.http.base_url
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(b"GET /health/live HTTP/1.1\r\nHost: gateway\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        await asyncio.wait_for(reader.read(), 30)  # to its end, which is the gateway's doing
        writer.close()
        await writer.wait_closed()
