"""The scheduler process put together, and its orderly start and end."""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from fastserve.v1 import admin_pb2_grpc
from fastserve_common.channels import GrpcServer
from fastserve_common.state import StateStore, membership, open_state
from fastserve_scheduler import codec
from fastserve_scheduler.admin import Admin
from fastserve_scheduler.admin_service import ADMIN_SERVICE, AdminService
from fastserve_scheduler.desk import Desk
from fastserve_scheduler.driver import Driver
from fastserve_scheduler.hold import Hold
from fastserve_scheduler.inbox import Inbox
from fastserve_scheduler.inputs import AbortAll, Drain, Input
from fastserve_scheduler.kv_link import KvLink
from fastserve_scheduler.leadership import MEMBER, ROLE, Leadership
from fastserve_scheduler.messages import Hello, Status
from fastserve_scheduler.metrics import Metrics, serve_metrics
from fastserve_scheduler.pipeline import Pipeline
from fastserve_scheduler.profiler import Profiler, ProfileStore
from fastserve_scheduler.service import SchedulerService
from fastserve_scheduler.settings import SchedulerSettings

log = logging.getLogger(__name__)

#: After the drain, for aborted requests to end and for gateways to read what is queued for them.
LAST_WORDS_S = 2.0

EXIT_LOST_LEAD = 1


@dataclass(slots=True)
class Scheduler:
    """Everything that works while this process leads."""

    driver: Driver
    pipeline: Pipeline
    kv_link: KvLink
    desk: Desk
    inbox: Inbox[Input]
    settings: SchedulerSettings

    def state(self) -> codec.ClusterState:
        runner = self.driver.runner
        stage_ns = {} if runner is None else runner.stage_ns
        stages = tuple((v.stage, v.up, v.address, stage_ns.get(v.stage, 0)) for v in self.pipeline.views())
        return codec.ClusterState(self.driver.settings.policy, self.driver.snapshot(), stages)

    async def drain(self) -> None:
        """Refuse new requests, let the others finish, abort those that do not in time."""
        self.inbox.put_now(Drain())
        for patience_s in (self.settings.drain_timeout, LAST_WORDS_S):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.driver.drained.wait(), patience_s)
                return
            self.inbox.put_now(AbortAll())


def build(
    settings: SchedulerSettings,
    store: StateStore,
    scheduler_id: str,
    generation: int,
    metrics: Metrics,
    on_status: Callable[[Status], None],
) -> Scheduler:
    inbox: Inbox[Input] = Inbox()
    pipeline = Pipeline(store, settings.num_stages, generation, inbox, time.monotonic)
    kv_link = KvLink(store, scheduler_id, generation, inbox)
    hello = Hello(generation, settings.max_model_len, settings.max_model_len, settings.policy, settings.num_stages)
    desk = Desk(hello, Hold(settings.max_num_queued_reqs, settings.max_num_queued_tokens, metrics.refused))
    profiler = Profiler(ProfileStore(settings.profile_dir), pipeline.send_measure, settings.max_num_seqs)
    driver = Driver(settings, inbox, pipeline, kv_link, profiler, desk, metrics, on_status)
    return Scheduler(driver, pipeline, kv_link, desk, inbox, settings)


@dataclass(slots=True)
class _Faces:
    """What this process serves, also while it stands by."""

    gateways: SchedulerService = field(default_factory=SchedulerService)
    operators: AdminService = field(default_factory=AdminService)

    def add_to(self, server: grpc.aio.Server) -> None:
        self.gateways.add_to(server)
        admin_pb2_grpc.add_AdminServicer_to_server(self.operators, server)

    def lead(self, scheduler: Scheduler) -> None:
        self.gateways.lead(scheduler.inbox, scheduler.state)
        self.operators.lead(scheduler.inbox, Admin(scheduler.driver, time.monotonic_ns))


async def run(settings: SchedulerSettings, stop: asyncio.Event) -> int:
    """Serve until `stop`. Returns the exit status. Raises SettingsError, StateError, OSError."""
    store = open_state(settings.state)
    faces = _Faces()
    grpc_server = GrpcServer.create((*codec.SERVICE_NAMES, ADMIN_SERVICE))
    faces.add_to(grpc_server.server)
    try:
        port = await grpc_server.start(settings.listen)
        await grpc_server.set_serving(False)
        log.info("listening", extra={"address": settings.address(port)})
        leadership = Leadership(store, uuid.uuid4().hex)
        generation = await _unless(stop, leadership.acquire())
        if generation is None:
            return 0
        log.info("leading", extra={"generation": generation})
        try:
            return await _lead(settings, store, faces, grpc_server, leadership, generation, port, stop)
        finally:
            await leadership.give_up()
    finally:
        await grpc_server.stop(LAST_WORDS_S)
        await store.close()


async def _lead(
    settings: SchedulerSettings,
    store: StateStore,
    faces: "_Faces",
    grpc_server: GrpcServer,
    leadership: Leadership,
    generation: int,
    port: int,
    stop: asyncio.Event,
) -> int:
    health = asyncio.Queue[Status]()
    metrics = Metrics()
    scheduler = build(settings, store, leadership.owner, generation, metrics, health.put_nowait)
    faces.lead(scheduler)
    info = leadership.facts(settings.address(port), generation)
    async with (
        _metrics_endpoint(settings, metrics, scheduler),
        membership(store, ROLE, MEMBER, info),
    ):
        work = [
            asyncio.create_task(scheduler.driver.run(), name="driver"),
            asyncio.create_task(scheduler.pipeline.run(), name="pipeline"),
            asyncio.create_task(scheduler.kv_link.run(), name="kvstore-link"),
            asyncio.create_task(_report_health(grpc_server, health), name="health"),
            asyncio.create_task(leadership.keep(), name="leadership"),
        ]
        try:
            stopped = asyncio.create_task(stop.wait(), name="stop")
            await asyncio.wait([*work, stopped], return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            if stop.is_set():
                await grpc_server.set_serving(False)
                await scheduler.drain()
                return 0
            return _why_ended(work)
        finally:
            scheduler.desk.close_all()
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)


def _why_ended(work: list[asyncio.Task[None]]) -> int:
    """Raises what a task raised; a task that simply returned is the one that watches the lease."""
    for task in work:
        if task.done():
            task.result()
    log.error("another scheduler leads now; this one ends")
    return EXIT_LOST_LEAD


async def _report_health(grpc_server: GrpcServer, health: asyncio.Queue[Status]) -> None:
    while True:
        await grpc_server.set_serving((await health.get()).ready)


@contextlib.asynccontextmanager
async def _metrics_endpoint(settings: SchedulerSettings, metrics: Metrics, scheduler: Scheduler) -> AsyncIterator[None]:
    if settings.metrics_port == 0:
        yield
        return
    port, close = serve_metrics(metrics, scheduler.driver.snapshot, settings.metrics_host, settings.metrics_port)
    log.info("metrics", extra={"address": f"{settings.metrics_host}:{port}"})
    try:
        yield
    finally:
        await asyncio.to_thread(close)


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, int]) -> int | None:
    """The result of `work`; None when `stop` is set first."""
    task, stopped = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([task, stopped], return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        stopped.cancel()
        await asyncio.gather(task, stopped, return_exceptions=True)
