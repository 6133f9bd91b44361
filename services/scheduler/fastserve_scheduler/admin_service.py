"""The gRPC face of the admin: wire in, an order in the driver's inbox, wire out."""

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

import grpc
import grpc.aio

from fastserve.v1 import admin_pb2 as pb
from fastserve.v1 import admin_pb2_grpc
from fastserve_common.errors import FastServeError, InvalidArgumentError, UnavailableError
from fastserve_scheduler.admin import CHANGEABLE, Admin, Operator
from fastserve_scheduler.inbox import Inbox
from fastserve_scheduler.inputs import Input, Ordered

ADMIN_SERVICE = pb.DESCRIPTOR.services_by_name["Admin"].full_name

T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]


class AdminService(admin_pb2_grpc.AdminServicer):
    """Refuses everybody with UNAVAILABLE until `lead` is called."""

    def __init__(self) -> None:
        self._inbox: Inbox[Input] | None = None
        self._admin: Admin | None = None

    def lead(self, inbox: Inbox[Input], admin: Admin) -> None:
        self._inbox, self._admin = inbox, admin

    async def _order(self, act: Callable[[Admin], T]) -> T:
        """Carried out by the driver's task, between two messages. Raises what `act` raises."""
        inbox, admin = self._inbox, self._admin
        if inbox is None or admin is None:
            raise UnavailableError("this scheduler stands by")
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def run() -> None:
            if answer.cancelled():
                return
            try:
                answer.set_result(act(admin))
            except FastServeError as error:
                answer.set_exception(error)

        inbox.put_now(Ordered(run))
        return await answer

    async def GetConfig(self, request: pb.GetConfigRequest, context: Context) -> pb.GetConfigResponse:
        return await self._order(
            lambda admin: pb.GetConfigResponse(
                config=_config(admin.config()), revision=admin.revision, draining=admin.served.draining
            )
        )

    async def UpdateConfig(self, request: pb.UpdateConfigRequest, context: Context) -> pb.UpdateConfigResponse:
        changes, operator = _changes(request), _operator(context, request.reason)

        def update(admin: Admin) -> pb.UpdateConfigResponse:
            after = admin.update(changes, operator)
            return pb.UpdateConfigResponse(config=_config(after), revision=admin.revision)

        return await self._order(update)

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        operator = _operator(context, request.reason)
        return pb.DrainResponse(live=await self._order(lambda admin: admin.drain(operator)))

    async def Resume(self, request: pb.ResumeRequest, context: Context) -> pb.ResumeResponse:
        operator = _operator(context, request.reason)
        await self._order(lambda admin: admin.resume(operator))
        return pb.ResumeResponse()

    async def ListJobs(self, request: pb.ListJobsRequest, context: Context) -> pb.ListJobsResponse:
        jobs, total = await self._order(lambda admin: admin.jobs(request.limit))
        return pb.ListJobsResponse(jobs=[pb.JobState(**asdict(job)) for job in jobs], total=total)

    async def GetJobStory(self, request: pb.GetJobStoryRequest, context: Context) -> pb.GetJobStoryResponse:
        if request.WhichOneof("job") is None:
            raise InvalidArgumentError("name a request_id or a job_id", param="job")
        job_id, moments = await self._order(lambda admin: admin.story(request.request_id, request.job_id))
        told = [pb.JobMoment(now_ns=m.now_ns, happening=m.happening.value, detail=m.detail) for m in moments]
        return pb.GetJobStoryResponse(job_id=job_id, moments=told)

    async def AbortJob(self, request: pb.AbortJobRequest, context: Context) -> pb.AbortJobResponse:
        operator = _operator(context, request.reason)
        await self._order(lambda admin: admin.abort(request.request_id, operator))
        return pb.AbortJobResponse()


def _config(values: dict[str, object]) -> pb.SchedulingConfig:
    return pb.SchedulingConfig(**values)  # type: ignore[arg-type]  # fields of the message by the settings' names


def _changes(request: pb.UpdateConfigRequest) -> dict[str, object]:
    paths = list(request.update_mask.paths)
    if not paths:
        raise InvalidArgumentError("update_mask: name the fields to change", param="update_mask")
    for path in paths:
        if path not in CHANGEABLE:
            known = ", ".join(CHANGEABLE)
            raise InvalidArgumentError(f"update_mask: {path!r} cannot be changed here; known: {known}", param=path)
    return {path: getattr(request.config, path) for path in paths}


def _operator(context: Context, reason: str) -> Operator:
    """The name in the certificate where there is one, else the address."""
    names = context.auth_context().get("x509_common_name") or []
    name = next((str(value, "utf-8", "replace") for value in names), "")
    return Operator(name or str(context.peer()), reason)
