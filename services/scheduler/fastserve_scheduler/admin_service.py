"""The gRPC face of the admin: wire in, an order in the driver's inbox, wire out."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import grpc
import grpc.aio

from fastserve.v1 import admin_pb2 as pb
from fastserve.v1 import admin_pb2_grpc
from fastserve_common.errors import FastServeError, InvalidArgumentError, UnavailableError
from fastserve_scheduler.admin import Admin, Operator
from fastserve_scheduler.inbox import Inbox
from fastserve_scheduler.inputs import Input, Ordered
from fastserve_scheduler.overrides import CHANGEABLE, Overrides

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
        return await self._order(_shown)

    async def UpdateConfig(self, request: pb.UpdateConfigRequest, context: Context) -> pb.UpdateConfigResponse:
        changes, operator = _changes(request), _operator(context, request.reason)
        return await self._changed(lambda admin: admin.update(changes, operator))

    async def ResetConfig(self, request: pb.ResetConfigRequest, context: Context) -> pb.UpdateConfigResponse:
        names, operator = list(request.reset_mask.paths), _operator(context, request.reason)
        _check_names("reset_mask", names)
        return await self._changed(lambda admin: admin.reset(names, operator))

    async def _changed(self, change: Callable[[Admin], dict[str, object]]) -> pb.UpdateConfigResponse:
        """The answer says whether the change is also saved; that it holds does not depend on it."""

        def act(admin: Admin) -> tuple[Overrides, pb.UpdateConfigResponse]:
            after = change(admin)
            return admin.overrides, pb.UpdateConfigResponse(config=_config(after), revision=admin.revision)

        overrides, response = await self._order(act)
        await overrides.save()
        response.not_saved = overrides.not_saved
        return response

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


def _shown(admin: Admin) -> pb.GetConfigResponse:
    overrides = [
        pb.ConfigOverride(name=name, peer=entry.peer, reason=entry.reason, changed_s=entry.changed_s)
        for name, entry in sorted(admin.overrides.entries.items())
    ]
    return pb.GetConfigResponse(
        config=_config(admin.config()),
        revision=admin.revision,
        draining=admin.served.draining,
        overrides=overrides,
        configured=_config(admin.configured()),
        not_saved=admin.overrides.not_saved,
    )


def _changes(request: pb.UpdateConfigRequest) -> dict[str, str | int | float]:
    paths = list(request.update_mask.paths)
    if not paths:
        raise InvalidArgumentError("update_mask: name the fields to change", param="update_mask")
    _check_names("update_mask", paths)
    return {path: getattr(request.config, path) for path in paths}


def _check_names(mask: str, paths: Sequence[str]) -> None:
    for path in paths:
        if path not in CHANGEABLE:
            known = ", ".join(CHANGEABLE)
            raise InvalidArgumentError(f"{mask}: {path!r} cannot be changed here; known: {known}", param=path)


def _operator(context: Context, reason: str) -> Operator:
    """The name in the certificate where there is one, else the address."""
    names = context.auth_context().get("x509_common_name") or []
    name = next((str(value, "utf-8", "replace") for value in names), "")
    return Operator(name or str(context.peer()), reason)
