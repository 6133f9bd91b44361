"""The gRPC service of one stage, and the server around it."""

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Callable

from grpc_health.v1 import health_pb2

from fastserve.v1 import stage_pb2, stage_pb2_grpc
from fastserve_common.channels import GrpcServer, full_names
from fastserve_common.errors import Context, FastServeError, InvalidArgumentError, UnavailableError
from fastserve_worker import codec
from fastserve_worker.backend import StageBackend
from fastserve_worker.control import ControlSession, Stage
from fastserve_worker.epoch import EpochRun
from fastserve_worker.errors import PlanError
from fastserve_worker.messages import StageInfo
from fastserve_worker.meter import NO_METER
from fastserve_worker.metrics import StageMetrics
from fastserve_worker.runner import StageRunner
from fastserve_worker.swap.copier import Copier
from fastserve_worker.swap.host_slab import HostSlab

log = logging.getLogger(__name__)

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

#: How long open calls may take to end, and the computation in progress after them.
STOP_GRACE_S = 1.0
STOP_COMPUTE_S = 10.0

#: Name under which gRPC health tells whether the process should live: it is false only when an iteration does not
#: end, never for being idle, unconfigured or still loading. Readiness is the health of the service itself.
LIVENESS = "live"
STALL_CHECK_S = 1.0


class StageService(stage_pb2_grpc.StageServicer):
    """Refuses every call with UNAVAILABLE until `stage` is set."""

    def __init__(self, make_session: Callable[[], ControlSession]) -> None:
        self.stage: Stage | None = None
        self._make_session = make_session

    def _ready(self) -> Stage:
        if self.stage is None:
            raise UnavailableError("this stage is still loading its model", retry_after_ms=1_000)
        return self.stage

    async def Control(
        self, request_iterator: AsyncIterator[stage_pb2.ControlMessage], context: Context
    ) -> AsyncIterator[stage_pb2.StageMessage]:
        stage, session = self._ready(), self._make_session()
        reader = asyncio.create_task(_read_control(request_iterator, stage, session), name="control-reader")
        try:
            async for message in session.messages():
                yield message
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            stage.detach(session)

    async def Forward(
        self, request_iterator: AsyncIterator[stage_pb2.ForwardMessage], context: Context
    ) -> AsyncIterator[stage_pb2.ForwardAck]:
        stage = self._ready()
        first = await anext(aiter(request_iterator), None)
        if first is None or not first.HasField("hello"):
            raise InvalidArgumentError("the first message of a Forward stream must be a hello")
        run = await stage.join(first.hello)
        async for message in request_iterator:
            if _take_forward(run, message):
                yield codec.forward_ack(message.activations.seq, run.epoch)


async def _read_control(
    messages: AsyncIterator[stage_pb2.ControlMessage], stage: Stage, session: ControlSession
) -> None:
    """Carry out what the scheduler says, in order; how the stream ends is how the session ends."""
    configured = False
    try:
        async for message in messages:
            match message.WhichOneof("message"):
                case "configure":
                    await stage.configure(message.configure, session)
                    configured = True
                case _ if not configured:
                    raise InvalidArgumentError("the first message of a Control stream must be a configure")
                case "plan":
                    stage.take_plan(message.plan, session)
                case "profile":
                    stage.take_profile(message.profile, session)
        session.end()
    except FastServeError as error:
        session.end(error)
    except Exception as error:
        log.exception("the control stream failed")
        session.end(FastServeError(f"internal error: {type(error).__name__}"))


def _take_forward(run: EpochRun, message: stage_pb2.ForwardMessage) -> bool:
    """Whether the message completes the activations of a plan."""
    try:
        match message.WhichOneof("message"):
            case "plan":
                run.take_plan(message.plan)
                return False
            case "activations":
                return run.take_part(message.activations)
            case _:
                raise PlanError("only plans and activations follow the hello of a Forward stream")
    except PlanError as error:
        raise InvalidArgumentError(str(error)) from error


class StageServer:
    """Listens from the start, so that health is answered while the model loads; serves from `load` on."""

    def __init__(
        self,
        stall_timeout_s: float = math.inf,
        make_session: Callable[[], ControlSession] = ControlSession,
        metrics: StageMetrics | None = None,
    ) -> None:
        """`stall_timeout_s`: an iteration that takes longer means that this process is stuck."""
        self._metrics = metrics
        self._stall_timeout_s = stall_timeout_s
        self._watch: asyncio.Task[None] | None = None
        self._service = StageService(make_session)
        self._server = GrpcServer.create(full_names(stage_pb2.DESCRIPTOR))
        stage_pb2_grpc.add_StageServicer_to_server(self._service, self._server.server)
        self._runner = StageRunner()

    @property
    def stage(self) -> Stage | None:
        """None until the backend is loaded."""
        return self._service.stage

    async def start(self, address: str) -> int:
        """Returns the port. Raises OSError when it is taken."""
        await self._server.set_serving(False)
        await self._server.health.set(LIVENESS, _SERVING)
        return await self._server.start(address)

    async def load(self, make_backend: Callable[[], StageBackend]) -> StageInfo:
        """Make the backend on the stage's thread, then serve it. Raises what `make_backend` raises."""
        backend = await self._runner.submit(make_backend)
        stage = Stage(backend, self._runner, Copier(backend.memory), self._metrics or NO_METER)
        if self._metrics is not None:
            self._metrics.watch(stage, self._runner.busy_s)
        self._service.stage = stage
        await self._server.set_serving(True)
        self._watch = asyncio.create_task(self._watch_progress(), name="progress")
        return backend.info

    async def attach_host(self, slab: HostSlab) -> None:
        """Swap with `slab` from now on; after `load`. Pinning its memory may take a while."""
        assert self.stage is not None
        await asyncio.to_thread(self.stage.copier.memory.attach, slab)
        self.stage.use_host(slab)

    async def _watch_progress(self) -> None:
        stalled = False
        while True:
            await asyncio.sleep(min(STALL_CHECK_S, self._stall_timeout_s))
            if stalled != (self._runner.busy_s() > self._stall_timeout_s):
                stalled = not stalled
                log.error("the stage is %s", "stuck in an iteration" if stalled else "moving again")
                await self._server.set_serving(not stalled)
                await self._server.health.set(LIVENESS, _NOT_SERVING if stalled else _SERVING)

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Not ready; streams end with UNAVAILABLE; calls end; the computation in progress ends."""
        if self._watch:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await self._server.set_serving(False)
        if self.stage:
            await self.stage.close(UnavailableError("this stage is shutting down"))
        await self._server.stop(grace_s)
        if self.stage and not await self.stage.copier.close(STOP_COMPUTE_S):
            log.warning("the copies in progress did not end within %g s", STOP_COMPUTE_S)
        if not await self._runner.close(STOP_COMPUTE_S):
            log.warning("the iteration in progress did not end within %g s", STOP_COMPUTE_S)


@contextlib.asynccontextmanager
async def serve_in_process(
    backend: StageBackend,
    stall_timeout_s: float = math.inf,
    host: HostSlab | None = None,
    make_session: Callable[[], ControlSession] = ControlSession,
    metrics: StageMetrics | None = None,
) -> AsyncIterator[tuple[Stage, str]]:
    """A stage served on a loopback port, and its address; for tests and demonstrations. `host`: what it swaps with."""
    server = StageServer(stall_timeout_s, make_session, metrics)
    port = await server.start("127.0.0.1:0")
    try:
        await server.load(lambda: backend)
        if host is not None:
            await server.attach_host(host)
        assert server.stage is not None
        yield server.stage, f"127.0.0.1:{port}"
    finally:
        await server.stop(grace_s=0.2)
