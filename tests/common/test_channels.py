"""Servers and channels as every service uses them: statuses of domain errors, message cap, health, reflection."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from fastserve.v1 import kvstore_pb2, kvstore_pb2_grpc
from fastserve_common import errors
from fastserve_common.channels import MAX_MESSAGE_BYTES, MAX_METADATA_BYTES, GrpcServer, full_names, open_channel

ERRORS: list[tuple[Exception, grpc.StatusCode, str]] = [
    (errors.InvalidArgumentError("n must be 1", param="n"), grpc.StatusCode.INVALID_ARGUMENT, "n must be 1"),
    (errors.NotFoundError("no such request"), grpc.StatusCode.NOT_FOUND, "no such request"),
    (errors.AlreadyExistsError("twice"), grpc.StatusCode.ALREADY_EXISTS, "twice"),
    (errors.FailedPreconditionError("old epoch"), grpc.StatusCode.FAILED_PRECONDITION, "old epoch"),
    (errors.ResourceExhaustedError("full", retry_after_ms=250), grpc.StatusCode.RESOURCE_EXHAUSTED, "full"),
    (errors.UnavailableError("loading"), grpc.StatusCode.UNAVAILABLE, "loading"),
    (errors.UnauthenticatedError("who?"), grpc.StatusCode.UNAUTHENTICATED, "who?"),
    (errors.DeadlineExceededError("late"), grpc.StatusCode.DEADLINE_EXCEEDED, "late"),
    (errors.AbortedError("aborted"), grpc.StatusCode.CANCELLED, "aborted"),
    (ZeroDivisionError("secret detail"), grpc.StatusCode.INTERNAL, "internal error"),
]


class Servicer(kvstore_pb2_grpc.KvStoreServicer):
    """Raises what it is told to, in both shapes of call; echoes otherwise."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    async def Attach(self, request: kvstore_pb2.AttachRequest, context: errors.Context) -> kvstore_pb2.AttachResponse:
        if self.error:
            raise self.error
        return kvstore_pb2.AttachResponse(segment=request.owner)

    async def Control(
        self, request_iterator: AsyncIterator[kvstore_pb2.KvCommand], context: errors.Context
    ) -> AsyncIterator[kvstore_pb2.KvEvent]:
        async for command in request_iterator:
            if self.error:
                raise self.error
            yield kvstore_pb2.KvEvent(leased=kvstore_pb2.SlotsLeased(lease_id=command.lease.lease_id))

    async def GetStatus(
        self, request: kvstore_pb2.GetStatusRequest, context: errors.Context
    ) -> kvstore_pb2.GetStatusResponse:
        return kvstore_pb2.GetStatusResponse()


@asynccontextmanager
async def serving(servicer: Servicer) -> AsyncIterator[tuple[GrpcServer, grpc.aio.Channel]]:
    server = GrpcServer.create(full_names(kvstore_pb2.DESCRIPTOR))
    kvstore_pb2_grpc.add_KvStoreServicer_to_server(servicer, server.server)
    port = await server.start("127.0.0.1:0")
    async with open_channel(f"127.0.0.1:{port}") as channel:
        yield server, channel
    await server.stop(0)


@pytest.mark.parametrize(("error", "code", "message"), ERRORS, ids=lambda value: str(value))
async def test_each_domain_error_has_its_status(error: Exception, code: grpc.StatusCode, message: str) -> None:
    async with serving(Servicer(error)) as (_, channel):
        stub = kvstore_pb2_grpc.KvStoreStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as unary:
            await stub.Attach(kvstore_pb2.AttachRequest())
        with pytest.raises(grpc.aio.AioRpcError) as streamed:
            async for _ in stub.Control(iter([kvstore_pb2.KvCommand()])):
                pass
    for raised in (unary.value, streamed.value):
        assert (raised.code(), raised.details()) == (code, message)
    hint = dict(unary.value.trailing_metadata() or ()).get(errors.RETRY_AFTER_METADATA)
    assert hint == ("250" if message == "full" else None)


async def test_a_message_of_the_cap_passes_and_a_larger_one_is_refused() -> None:
    async with serving(Servicer()) as (_, channel):
        stub = kvstore_pb2_grpc.KvStoreStub(channel)
        large = "x" * (MAX_MESSAGE_BYTES - 64)
        assert (await stub.Attach(kvstore_pb2.AttachRequest(owner=large))).segment == large
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.Attach(kvstore_pb2.AttachRequest(owner="x" * MAX_MESSAGE_BYTES))
    assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_health_follows_readiness() -> None:
    async with serving(Servicer()) as (server, channel):
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        for ready, expected in ((True, "SERVING"), (False, "NOT_SERVING")):
            await server.set_serving(ready)
            for service in ("", "fastserve.v1.KvStore"):
                answer = await check(health_pb2.HealthCheckRequest(service=service))
                assert health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status) == expected


async def test_reflection_lists_the_service() -> None:
    async with serving(Servicer()) as (_, channel):
        info = channel.stream_stream(
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        answers = [answer async for answer in info(iter([request]))]
    names = {service.name for service in answers[0].list_services_response.service}
    assert {"fastserve.v1.KvStore", "grpc.health.v1.Health"} <= names


async def test_a_taken_port_is_an_os_error() -> None:
    first = GrpcServer.create(())
    taken = await first.start("127.0.0.1:0")
    with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{taken}"):
        await GrpcServer.create(()).start(f"127.0.0.1:{taken}")
    await first.stop(0)


async def test_cancelling_many_streams_leaves_no_task_behind() -> None:
    async with serving(Servicer()) as (_, channel):
        stub = kvstore_pb2_grpc.KvStoreStub(channel)
        before = len(asyncio.all_tasks())
        calls = [stub.Control() for _ in range(50)]
        for call in calls:
            await call.write(kvstore_pb2.KvCommand())
            await call.read()
        for call in calls:
            call.cancel()
        async with asyncio.timeout(10):
            while len(asyncio.all_tasks()) > before + 2:  # noqa: ASYNC110 - tasks of the library end unannounced
                await asyncio.sleep(0.01)


async def test_headers_above_the_cap_are_refused() -> None:
    async with serving(Servicer()) as (_, channel):
        stub = kvstore_pb2_grpc.KvStoreStub(channel)
        few = (("x", "a" * (MAX_METADATA_BYTES // 2)),)
        assert (await stub.Attach(kvstore_pb2.AttachRequest(owner="me"), metadata=few)).segment == "me"
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.Attach(kvstore_pb2.AttachRequest(), metadata=(("x", "a" * MAX_METADATA_BYTES),))
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
