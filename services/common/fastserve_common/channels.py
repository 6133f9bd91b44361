"""gRPC servers and channels with one set of options on both ends: message cap, keepalive, health, reflection."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from fastserve_common.errors import ErrorInterceptor
from fastserve_common.tls import identity

#: The largest message either end sends or accepts. Activations are cut into chunks far below it.
MAX_MESSAGE_BYTES = 32 * 1024 * 1024

#: Headers of one call, together.
MAX_METADATA_BYTES = 16 * 1024

ChannelOptions = tuple[tuple[str, int | str], ...]


@dataclass(frozen=True, slots=True)
class Keepalive:
    """After `idle_ms` without a word the other end is pinged; `timeout_ms` without an answer end the connection and all
    streams on it. gRPC answers pings by itself, whatever the process computes, unless that is stopped or cut off."""

    idle_ms: int
    timeout_ms: int

    def options(self) -> ChannelOptions:
        return (
            ("grpc.keepalive_time_ms", self.idle_ms),
            ("grpc.keepalive_timeout_ms", self.timeout_ms),
            # What counts: without it a ping may go unanswered for a minute, keepalive or not (seen with gRPC 1.85).
            ("grpc.http2.ping_timeout_ms", self.timeout_ms),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
        )


#: A peer that is stopped or cut off is given up after 15 s. Most of them are patience with a machine that is busy.
KEEPALIVE = Keepalive(idle_ms=5_000, timeout_ms=10_000)

_COMMON: ChannelOptions = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
)


def client_options() -> ChannelOptions:
    return (
        *_COMMON,
        *KEEPALIVE.options(),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.use_local_subchannel_pool", 1),
    )


def server_options() -> ChannelOptions:
    return (
        *_COMMON,
        *KEEPALIVE.options(),
        # The other end pings as often as we do; without these two the server calls that too many pings.
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE.idle_ms // 2),
        ("grpc.http2.max_ping_strikes", 0),
        # Two processes on one port would share connections silently.
        ("grpc.so_reuseport", 0),
    )


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel to a service at `host:port` or `unix:path`. Connects lazily and reconnects by itself.

    With the identity of this process (`fastserve_common.tls`), where it has one.
    """
    me = identity()
    if me is None:
        return grpc.aio.insecure_channel(address, options=client_options())
    # Addresses change, the name in the certificates does not.
    options = (*client_options(), ("grpc.ssl_target_name_override", me.name))
    return grpc.aio.secure_channel(address, me.channel_credentials(), options=options)


@dataclass(slots=True)
class GrpcServer:
    """A server with health and reflection. Add servicers to `server`, then `start`."""

    server: grpc.aio.Server
    health: health.aio.HealthServicer
    service_names: tuple[str, ...]

    @classmethod
    def create(
        cls, service_names: Sequence[str], interceptors: Sequence[grpc.aio.ServerInterceptor] = ()
    ) -> "GrpcServer":
        """`service_names`: full names, for reflection and per-service health."""
        server = grpc.aio.server(options=server_options(), interceptors=[*interceptors, ErrorInterceptor()])
        servicer = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        names = (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        return cls(server, servicer, tuple(service_names))

    async def start(self, address: str) -> int:
        """Listen on `host:port` for other services, with the identity of this process where it has one; port 0 picks
        one. Returns the port. Raises OSError when it is taken or is none."""
        me = identity()
        return await self.start_public(address, me.server_credentials() if me else None)

    async def start_public(self, address: str, credentials: grpc.ServerCredentials | None) -> int:
        """`start` for everybody: `credentials` are all that is asked of callers; None: in the clear."""
        number = address.rpartition(":")[2]
        if not address.startswith("unix:") and not (number.isascii() and number.isdecimal() and int(number) < 2**16):
            raise OSError(f"cannot listen on {address}: expected HOST:PORT")  # gRPC would listen on port modulo 2**16
        try:
            if credentials is None:
                port = self.server.add_insecure_port(address)
            else:
                port = self.server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}: {error}") from error
        await self.server.start()
        return port

    async def set_serving(self, serving: bool) -> None:
        """Readiness, for gRPC health checks of the whole server and of each service."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self.service_names):
            await self.health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        await self.set_serving(False)
        await self.server.stop(grace_s)


def advertised_address(listen: str, port: int, advertise: str = "") -> str:
    """`host:port` that others reach a server by: `advertise` when given, else the host it listens on.

    A server that listens on every interface is reached by the machine's name.
    """
    host = advertise or listen.rpartition(":")[0]
    if host in ("", "0.0.0.0", "[::]", "*"):
        host = socket.gethostname()
    return f"{host}:{port}"


def full_names(*descriptors: Any) -> tuple[str, ...]:  # noqa: ANN401 - generated file descriptors have no common type
    """Full service names of generated modules' DESCRIPTORs."""
    return tuple(service.full_name for d in descriptors for service in d.services_by_name.values())
