"""The gateway process: one event loop with both servers, the link to the scheduler, and an ordered shutdown."""

import asyncio
import contextlib
import logging
import resource
import socket
import ssl
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass

import uvicorn

from fastserve.v1 import inference_pb2_grpc
from fastserve_common.channels import GrpcServer
from fastserve_common.state import StateError, StateStore, membership, open_state, without_password
from fastserve_common.tls import public_server_credentials
from fastserve_gateway.engine.engine import Engine
from fastserve_gateway.engine.events import ClusterView
from fastserve_gateway.engine.groups import SchedulerGroups
from fastserve_gateway.http.app import build_app
from fastserve_gateway.http.protocol import LimitedHttpProtocol
from fastserve_gateway.in_flight import InFlight
from fastserve_gateway.keys import KeyCheck, KeyFile
from fastserve_gateway.metrics import Metrics
from fastserve_gateway.quota import Quotas
from fastserve_gateway.rpc.interceptors import EdgeInterceptor
from fastserve_gateway.rpc.service import SERVICE_NAMES, InferenceService
from fastserve_gateway.settings import GatewaySettings
from fastserve_gateway.shared import SharedCounts
from fastserve_gateway.text.model import TextModel

log = logging.getLogger(__name__)

#: Connections that the kernel holds for us while we are busy.
LISTEN_BACKLOG = 2048
#: Descriptors kept back from clients: scheduler, state store, files, logs.
RESERVED_FDS = 64
#: Idle connections stay longer than load balancers (60 s) and client pools keep them: whoever closes first must be the
#: client, or a request that is on its way meets a closed connection.
KEEP_ALIVE_S = 75
#: After requests were aborted, how long connections get to deliver their last bytes.
CLOSE_TIMEOUT_S = 2


class _HttpServer(uvicorn.Server):
    """Signals are the process's business, not the server's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass(slots=True)
class Gateway:
    """A running gateway; see `running`."""

    engine: Engine
    http_port: int
    #: None: gRPC is off.
    grpc_port: int | None


def raise_fd_limit() -> int:
    """Soft limit of open files to the hard limit. Returns how many there are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


@contextlib.asynccontextmanager
async def running(settings: GatewaySettings) -> AsyncIterator[Gateway]:
    """Start everything; leaving the block shuts down in order:

    not ready -> new requests refused -> those in progress go on for `drain_timeout` -> the rest aborted -> closed.

    Raises ModelFilesError, OSError (address taken), StateError, ValueError (state URL).
    """
    text = TextModel(settings.model_dir)
    gateway_id = uuid.uuid4().hex
    metrics = Metrics(settings.model_names[0], vllm_names=settings.vllm_metric_names)
    keys = KeyCheck(settings.api_key, KeyFile(settings.api_key_file) if settings.api_key_file else None)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(text.close)
        store = await _open_store(settings.state, stack)
        health = _Health(lambda: engine.not_ready())
        link = SchedulerGroups(
            store,
            gateway_id,
            reconnect_timeout_s=settings.reconnect_timeout,
            only=settings.group,
            on_change=health.on_change,
        )
        shared = SharedCounts(store)
        quotas = Quotas(
            shared,
            metrics,
            requests_per_min=settings.rate_limit_requests_per_min,
            tokens_per_min=settings.rate_limit_tokens_per_min,
        )
        in_flight = InFlight(shared, metrics, gateway_id, limit=settings.max_concurrent_requests_per_key)
        stack.push_async_callback(in_flight.tell)
        await _background(in_flight.run(), stack)
        engine = Engine(settings, text, link, metrics, quotas, in_flight)
        http_socket = stack.enter_context(contextlib.closing(_listen(settings.host, settings.port)))
        http_port = http_socket.getsockname()[1]
        grpc_port = await _start_grpc(settings, engine, keys, health, stack)
        await _start_http(settings, engine, keys, http_socket, stack)
        await _background(link.run(), stack)
        info = {"http": f"{settings.host}:{http_port}", "grpc": f"{settings.host}:{grpc_port}" if grpc_port else ""}
        await stack.enter_async_context(membership(store, "gateway", gateway_id, info))
        log.info("listening", extra=info)
        yield Gateway(engine, http_port, grpc_port)
        log.info("draining")
        engine.start_draining()
        health.on_change(link.view)
        if not await engine.drained(settings.drain_timeout):
            log.warning("requests were still in progress when the drain time was over; aborted them")


class _Health:
    """gRPC health follows the link's view; HTTP readiness reads it when asked."""

    def __init__(self, not_ready: Callable[[], str | None]) -> None:
        """`not_ready`: why requests would fail now; None when they would not."""
        self._not_ready = not_ready
        self._ready = False
        self._changed = asyncio.Event()

    def on_change(self, view: ClusterView) -> None:
        reason = self._not_ready()
        if (reason is None) != self._ready:
            log.info("ready" if reason is None else f"not ready: {reason}")
        self._ready = reason is None
        self._changed.set()

    async def run(self, server: GrpcServer) -> None:
        while True:
            self._changed.clear()
            await server.set_serving(self._ready)
            await self._changed.wait()


async def _open_store(url: str, stack: contextlib.AsyncExitStack) -> StateStore:
    store = open_state(url)
    stack.push_async_callback(store.close)
    try:
        await store.members("scheduler")
    except StateError as error:
        raise StateError(f"--state {without_password(url)}: {error}") from error
    return store


async def _background(work: Coroutine[None, None, None], stack: contextlib.AsyncExitStack) -> None:
    """Runs until the stack is left."""
    task = asyncio.ensure_future(work)

    async def stop() -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    stack.push_async_callback(stop)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return listener


async def _start_http(
    settings: GatewaySettings, engine: Engine, keys: KeyCheck, listener: socket.socket, stack: contextlib.AsyncExitStack
) -> None:
    config = uvicorn.Config(
        build_app(engine, keys),
        http=LimitedHttpProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=LISTEN_BACKLOG,
        limit_concurrency=max(1, raise_fd_limit() - RESERVED_FDS),
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
    )
    server = _HttpServer(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))

    async def stop() -> None:
        server.should_exit = True
        await asyncio.gather(task, return_exceptions=True)

    stack.push_async_callback(stop)
    while not server.started:
        if task.done():
            task.result()
        await asyncio.sleep(0.01)


async def _start_grpc(
    settings: GatewaySettings, engine: Engine, keys: KeyCheck, health: _Health, stack: contextlib.AsyncExitStack
) -> int | None:
    port = settings.grpc_port
    if port == -1:
        return None
    if port is None:
        port = settings.port + 1 if settings.port else 0
    server = GrpcServer.create(SERVICE_NAMES, [EdgeInterceptor(keys)])
    inference_pb2_grpc.add_InferenceServicer_to_server(InferenceService(engine), server.server)
    address = f"{settings.host}:{port}"
    credentials = None
    if settings.ssl_certfile and settings.ssl_keyfile:
        credentials = public_server_credentials(settings.ssl_certfile, settings.ssl_keyfile)
    bound = await server.start_public(address, credentials)
    stack.push_async_callback(server.stop, CLOSE_TIMEOUT_S)
    await _background(health.run(server), stack)
    return bound


def check_tls(settings: GatewaySettings) -> None:
    """Fail with a sentence before anything is started. Raises OSError or ssl.SSLError."""
    if settings.ssl_certfile and settings.ssl_keyfile:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
