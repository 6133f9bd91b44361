"""Gateway, scheduler and torch stages in this process, talking over real sockets as their processes do."""

import asyncio
import contextlib
import functools
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch

from fastserve import AsyncClient
from fastserve.v1 import scheduler_pb2, scheduler_pb2_grpc
from fastserve_common.channels import open_channel
from fastserve_common.state import StateStore, open_state
from fastserve_gateway.server import Gateway, running
from fastserve_gateway.settings import GatewaySettings
from fastserve_kvstore.__main__ import serve as serve_kvstore
from fastserve_kvstore.settings import KvStoreSettings
from fastserve_scheduler import app
from fastserve_scheduler.settings import SchedulerSettings
from fastserve_worker.settings import WorkerSettings
from fastserve_worker.worker import run_worker

from .models import BLOCK_SIZE, MAX_MODEL_LEN, whole_block_bytes

PATIENCE_S = 60.0
MODEL = "tiny"
NODE = "here"


@dataclass(frozen=True, slots=True)
class Plan:
    """What a cluster is made of. `host_blocks` 0: no kvstore."""

    kind: str = "llama"
    num_stages: int = 1
    num_blocks: int = 200
    max_model_len: int = MAX_MODEL_LEN
    host_blocks: int = 0
    scheduler_flags: Sequence[str] = ()
    gateway: Mapping[str, Any] = field(default_factory=dict)
    num_ranks: int = 1


@dataclass(slots=True)
class Cluster:
    gateway: Gateway
    http: httpx.AsyncClient
    sdk: AsyncClient
    store: StateStore

    async def state(self) -> scheduler_pb2.GetStateResponse:
        address = (await self.store.members("scheduler"))["leader"]["address"]
        async with open_channel(address) as channel:
            return await scheduler_pb2_grpc.SchedulerStub(channel).GetState(scheduler_pb2.GetStateRequest())

    async def settled(self) -> None:
        """Nothing is left of any request."""

        async def clean() -> bool:
            state = await self.state()
            return (
                not (state.running or state.waiting or state.swapped or state.batches_in_flight)
                and state.device_blocks_free == state.device_blocks_total
                and state.host_blocks_free == state.host_blocks_total
            )

        await until(clean)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not await condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def cluster(folder: Path, model_dir: Path, profiles: Path, plan: Plan) -> AsyncIterator[Cluster]:
    """Ready to serve; on the way out everything must be free again."""
    url = f"sqlite://{folder}/state.db"
    async with contextlib.AsyncExitStack() as stack:
        _keep_interpreter_as_it_is(stack)
        store = open_state(url)
        stack.push_async_callback(store.close)
        if plan.host_blocks:
            host = KvStoreSettings(state=url, node=NODE, host_kv_memory=plan.host_blocks * whole_block_bytes(plan.kind))
            await stack.enter_async_context(_service(lambda stop: serve_kvstore(host, stop)))
            await until(lambda: is_member(store, "kvstore", NODE))
        for stage in range(plan.num_stages):
            ranks = [
                WorkerSettings(
                    state=url,
                    model_dir=model_dir,
                    stage=stage,
                    num_stages=plan.num_stages,
                    tensor_parallel_size=plan.num_ranks,
                    tensor_parallel_rank=rank,
                    threads=1,
                    kv_memory=plan.num_blocks * whole_block_bytes(plan.kind),
                    block_size=BLOCK_SIZE,
                    max_model_len=plan.max_model_len,
                    node=NODE,
                )
                for rank in range(plan.num_ranks)
            ]
            # One after the other: while a model is loaded, torch's defaults are those of its process.
            await stack.enter_async_context(_service(functools.partial(_run_ranks, ranks)))
            await until(functools.partial(is_member, store, "stage", f"stage-{stage}"))
        flags = ["--state", url, "--num-stages", str(plan.num_stages), "--profile-dir", str(profiles), "--check"]
        scheduler = SchedulerSettings.load([*flags, *plan.scheduler_flags], prog="test")
        await stack.enter_async_context(_service(lambda stop: app.run(scheduler, stop)))
        settings = GatewaySettings(
            state=url,
            model_dir=model_dir,
            served_model_name=(MODEL,),
            port=0,
            drain_timeout=1,
            **plan.gateway,
        )
        gateway = await stack.enter_async_context(running(settings))
        base_url = f"http://127.0.0.1:{gateway.http_port}"
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=base_url, timeout=PATIENCE_S))
        sdk = await stack.enter_async_context(AsyncClient(f"127.0.0.1:{gateway.grpc_port}"))
        served = Cluster(gateway, http, sdk, store)
        await until(lambda: _is_ready(served))
        yield served
        await served.settled()


async def _run_ranks(ranks: Sequence[WorkerSettings], stop: asyncio.Event) -> int:
    return max(await asyncio.gather(*(run_worker(settings, stop) for settings in ranks)))


async def is_member(store: StateStore, role: str, member: str) -> bool:
    return member in await store.members(role)


async def _is_ready(served: Cluster) -> bool:
    return (await served.http.get("/health/ready")).status_code == 200


@contextlib.asynccontextmanager
async def _service(run: Callable[[asyncio.Event], Coroutine[None, None, int | None]]) -> AsyncIterator[None]:
    """A service as a task; what ends it early is raised where it is waited for."""
    stop = asyncio.Event()
    task = asyncio.create_task(run(stop))
    try:
        yield
    finally:
        stop.set()
        assert not await asyncio.wait_for(task, PATIENCE_S)


def _keep_interpreter_as_it_is(stack: contextlib.AsyncExitStack) -> None:
    """Workers set these for their own process."""
    stack.callback(sys.setswitchinterval, sys.getswitchinterval())
    stack.callback(torch.set_num_threads, torch.get_num_threads())
