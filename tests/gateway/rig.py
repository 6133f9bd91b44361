"""A real gateway on loopback, in front of a fake scheduler, with every kind of client."""

import asyncio
import contextlib
import json
import resource
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import openai
from tokenizers import Tokenizer

from fastserve.v1 import inference_pb2_grpc, scheduler_pb2
from fastserve_common.channels import open_channel
from fastserve_common.state import StateStore, open_state
from fastserve_gateway.server import Gateway, running
from fastserve_gateway.settings import GatewaySettings

from .fake_scheduler import FakeScheduler, Script
from .models import write_model

MODEL = "tiny"

Choose = Callable[[scheduler_pb2.SubmitRequest], Script]


def resident_bytes() -> int:
    """Of this process, the gateway's and its clients'."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


async def until(condition: Callable[[], bool], timeout_s: float = 15.0) -> None:
    """Wait for `condition`; fails with its source position, not with a hang."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.005)


async def until_status(http: httpx.AsyncClient, path: str, status: int, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        if (await http.get(path)).status_code == status:
            return
        assert time.monotonic() < deadline, f"{path} did not become {status}"
        await asyncio.sleep(0.02)


@dataclass
class Rig:
    gateway: Gateway
    fake: FakeScheduler
    store: StateStore
    http: httpx.AsyncClient
    channel: grpc.aio.Channel
    settings: GatewaySettings
    scripts: dict[str, Script] = field(default_factory=dict)

    @property
    def stub(self) -> Any:  # noqa: ANN401 - the async stub type exists in the stubs only
        return inference_pb2_grpc.InferenceStub(self.channel)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.gateway.http_port}"

    def openai(self, **options: Any) -> openai.AsyncOpenAI:  # noqa: ANN401 - passed through
        options.setdefault("api_key", "unused")
        return openai.AsyncOpenAI(base_url=f"{self.base_url}/v1", max_retries=0, **options)

    async def complete(self, **body: object) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"prompt": "x", **body})

    async def chat(self, **body: object) -> httpx.Response:
        return await self.http.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], **body}
        )

    async def stream(self, path: str = "/v1/completions", /, **body: object) -> list[dict[str, Any]]:
        """The events of a streamed answer, `[DONE]` checked and left off."""
        async with self.http.stream("POST", path, json={"stream": True, **body}) as response:
            raw = await response.aread()
            assert response.status_code == 200, raw
        return parse_events(raw)

    def metric(self, name: str, **labels: str) -> float:
        value = self.gateway.engine.metrics.registry.get_sample_value(
            f"fastserve:{name}", {"model_name": MODEL, **labels}
        )
        return value or 0.0

    def outcomes(self) -> dict[str, float]:
        names = ("stop", "length", "abort", "timeout", "rejected", "error")
        found = {name: self.metric("request_success_total", finished_reason=name) for name in names}
        return {name: count for name, count in found.items() if count}

    async def quiet(self) -> None:
        """Nothing is live anywhere, and every accepted answer ended in exactly one way."""
        engine = self.gateway.engine
        await until(lambda: not engine._sessions and not engine._link.num_live and not self.fake.live())
        assert self.metric("requests_accepted_total") == sum(self.outcomes().values())
        assert self.metric("num_requests_running") == 0
        assert self.metric("num_requests_waiting") == 0


def parse_events(raw: bytes) -> list[dict[str, Any]]:
    blocks = raw.decode().split("\n\n")
    assert blocks.pop() == ""
    lines = [block for block in blocks if not block.startswith(":")]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@contextlib.asynccontextmanager
async def rig(
    tmp_path: Path,
    script: Choose | Script | None = None,
    *,
    chat: bool = True,
    tokenizer: Tokenizer | None = None,
    **overrides: Any,  # noqa: ANN401 - settings of any type
) -> AsyncIterator[Rig]:
    """Ready to serve. `script`: what every request gets, or a function of the submission."""
    chosen = script if script is not None else Script(ids=list(b"hello world"))
    fake = FakeScheduler(chosen if callable(chosen) else lambda _: chosen)
    model_dir = write_model(tmp_path / "model", chat=chat, tokenizer=tokenizer)
    values: dict[str, Any] = {
        "state": f"sqlite://{tmp_path}/state.db",
        "model_dir": model_dir,
        "served_model_name": (MODEL,),
        "port": 0,
        "drain_timeout": 0.2,
        **overrides,
    }
    settings = GatewaySettings(**values)
    store = open_state(settings.state)
    await fake.start(store)
    try:
        async with running(settings) as gateway:
            base_url = f"http://127.0.0.1:{gateway.http_port}"
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
            async with (
                httpx.AsyncClient(base_url=base_url, timeout=30, limits=limits) as http,
                open_channel(f"127.0.0.1:{gateway.grpc_port}") as channel,
            ):
                await until(lambda: gateway.engine.not_ready() is None)
                yield Rig(gateway, fake, store, http, channel, settings)
    finally:
        await fake.stop()
        await store.close()
