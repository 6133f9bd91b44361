"""The scheduler process put together, and its orderly start and end."""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from fastserve.v1 import admin_pb2_grpc
from fastserve_common.channels import GrpcServer
from fastserve_common.settings import SettingsError
from fastserve_common.state import StateStore, in_group, membership, open_state
from fastserve_scheduler import codec
from fastserve_scheduler.admin import Admin
from fastserve_scheduler.admin_service import ADMIN_SERVICE, AdminService
from fastserve_scheduler.compiled import COMPILED
from fastserve_scheduler.fleet import Fleet
from fastserve_scheduler.leadership import ROLE, Leadership
from fastserve_scheduler.messages import Status
from fastserve_scheduler.metrics import serve_metrics
from fastserve_scheduler.overrides import NOTE, Overrides
from fastserve_scheduler.service import SchedulerService
from fastserve_scheduler.settings import SchedulerSettings

log = logging.getLogger(__name__)

EXIT_LOST_LEAD = 1

#: After the drain, for gateways to read what is queued for them.
LAST_WORDS_S = 2.0


@dataclass(slots=True)
class _Faces:
    """What this process serves, also while it stands by."""

    gateways: SchedulerService = field(default_factory=SchedulerService)
    operators: AdminService = field(default_factory=AdminService)

    def add_to(self, server: grpc.aio.Server) -> None:
        self.gateways.add_to(server)
        admin_pb2_grpc.add_AdminServicer_to_server(self.operators, server)

    def lead(self, fleet: Fleet, admin: Admin) -> None:
        self.gateways.lead(fleet.inbox, fleet.state)
        self.operators.lead(fleet.inbox, admin)


async def run(settings: SchedulerSettings, stop: asyncio.Event) -> int:
    """Serve until `stop`. Returns the exit status. Raises SettingsError, StateError, OSError."""
    store = open_state(settings.state)
    faces = _Faces()
    grpc_server = GrpcServer.create((*codec.SERVICE_NAMES, ADMIN_SERVICE))
    faces.add_to(grpc_server.server)
    try:
        port = await grpc_server.start(settings.listen)
        await grpc_server.set_serving(False)
        address = settings.address(port)
        log.info("listening", extra={"address": address, "compiled": COMPILED})
        leadership = Leadership(store, uuid.uuid4().hex, settings.group)
        try:
            return await _Process(settings, store, faces, grpc_server, leadership, address).serve(stop)
        finally:
            await leadership.give_up()
    finally:
        await grpc_server.stop(LAST_WORDS_S)
        await store.close()


@dataclass(slots=True)
class _Process:
    """A scheduler that listens: it stands by, then leads."""

    settings: SchedulerSettings
    store: StateStore
    faces: _Faces
    grpc_server: GrpcServer
    leadership: Leadership
    address: str

    async def serve(self, stop: asyncio.Event) -> int:
        overrides: Overrides | None = None
        while True:
            generation = await _unless(stop, self.leadership.acquire())
            if generation is None:
                return 0
            log.info("leading", extra={"generation": generation})
            if overrides is None:
                note = in_group(NOTE, self.settings.group)
                overrides = Overrides(self.store, generation, self.settings, note)
                await overrides.load()
            overrides.generation = generation
            try:
                return await self._lead(overrides, generation, stop)
            except SettingsError as error:
                if not overrides.entries:
                    raise
                # Else every scheduler would end here, and nobody be left to take the change back.
                log.error("what operators have changed cannot be served by these stages, and is reset: %s", error)
                overrides.entries = {}

    async def _lead(self, overrides: Overrides, generation: int, stop: asyncio.Event) -> int:
        health = asyncio.Queue[Status]()
        fleet = Fleet.build(overrides.settings, self.store, self.leadership.owner, generation, health.put_nowait)
        admin = Admin(fleet, overrides, time.monotonic_ns)
        admin.tell_adopted(overrides.entries)
        self.faces.lead(fleet, admin)
        info = self.leadership.facts(self.address, generation)
        async with (
            _metrics_endpoint(self.settings, fleet),
            membership(self.store, ROLE, self.leadership.member, info),
        ):
            work = [
                *(asyncio.create_task(work, name=name) for name, work in fleet.tasks()),
                asyncio.create_task(_report_health(self.grpc_server, health), name="health"),
                asyncio.create_task(overrides.keep(admin.adopt), name="overrides"),
                asyncio.create_task(fleet.report_load(), name="load"),
                asyncio.create_task(self.leadership.keep(), name="leadership"),
            ]
            try:
                stopped = asyncio.create_task(stop.wait(), name="stop")
                await asyncio.wait([*work, stopped], return_when=asyncio.FIRST_COMPLETED)
                stopped.cancel()
                if stop.is_set():
                    await self.grpc_server.set_serving(False)
                    await fleet.drain()
                    return 0
                return _why_ended(work)
            finally:
                fleet.close_links()
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
async def _metrics_endpoint(settings: SchedulerSettings, fleet: Fleet) -> AsyncIterator[None]:
    if settings.metrics_port == 0:
        yield
        return
    sources = [(replica.metrics, replica.driver.snapshot) for replica in fleet.replicas]
    where = settings.metrics_host, settings.metrics_port
    port, close = serve_metrics(sources, *where, vllm_model=settings.vllm_model)
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
