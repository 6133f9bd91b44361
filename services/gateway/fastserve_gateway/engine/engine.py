"""Admission: what is live at this gateway, and whether one more request may be."""

import asyncio
from dataclasses import replace

from fastserve.v1 import scheduler_pb2
from fastserve_common.errors import AlreadyExistsError, ResourceExhaustedError, UnavailableError
from fastserve_gateway.codec import DEFAULT_RETRY_MS
from fastserve_gateway.engine.events import ClusterView
from fastserve_gateway.engine.groups import SchedulerGroups
from fastserve_gateway.engine.session import NOT_CONNECTED, Session
from fastserve_gateway.in_flight import InFlight
from fastserve_gateway.metrics import Metrics
from fastserve_gateway.quota import Quotas
from fastserve_gateway.request import GenerationRequest, RequestBuilder, RequestFields
from fastserve_gateway.settings import GatewaySettings
from fastserve_gateway.text.model import TextModel

DRAINING = "the gateway is shutting down"


class Engine:
    def __init__(
        self,
        settings: GatewaySettings,
        text: TextModel,
        link: SchedulerGroups,
        metrics: Metrics,
        quotas: Quotas,
        in_flight: InFlight,
    ) -> None:
        self.settings = settings
        self.text = text
        self.metrics = metrics
        self.builder = RequestBuilder(
            text,
            model_names=settings.model_names,
            max_prompt_bytes=settings.max_prompt_bytes,
            seed=settings.seed,
        )
        self._link = link
        self._quotas = quotas
        self._in_flight = in_flight
        self._sessions: dict[str, Session] = {}
        self._num_answers = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        metrics.watch(
            running=lambda: self.num_running,
            waiting=lambda: self.num_waiting,
            connected=lambda: float(self.view.connected),
            serving=lambda: self.view.serving,
            groups=link.counts,
        )

    @property
    def view(self) -> ClusterView:
        return self._link.view

    @property
    def num_running(self) -> int:
        """Answers that have their first token."""
        return sum(session.num_running for session in self._sessions.values())

    @property
    def num_waiting(self) -> int:
        return sum(session.num_open for session in self._sessions.values()) - self.num_running

    async def scheduler_state(self) -> scheduler_pb2.GetStateResponse:
        """For people, never on the path of a request. Raises LinkLostError, AioRpcError."""
        return await self._link.scheduler_state()

    @property
    def max_model_len(self) -> int | None:
        """Advertised and enforced alike; None before the first scheduler said hello."""
        bounds = [bound for bound in (self.view.max_model_len, self.settings.max_model_len) if bound is not None]
        return min(bounds) if self.view.max_model_len is not None else None

    def not_ready(self) -> str | None:
        """Why requests would fail now; None when ready."""
        if self._draining:
            return DRAINING
        return None if self.view.serving else self.view.detail or "the model is not ready"

    async def build(self, fields: RequestFields, names: dict[str, str] | None = None) -> GenerationRequest:
        """Raises UnavailableError while there is nobody to send requests to, QuotaExceededError, and what
        `RequestBuilder` raises: a request that is wrong costs the caller nothing.
        """
        self._check_available()
        max_model_len = self.max_model_len
        if max_model_len is None:
            raise UnavailableError("the scheduler has not told its limits", retry_after_ms=DEFAULT_RETRY_MS)
        request = await self.builder.build(fields, max_model_len=max_model_len, names=names)
        quota = await self._quotas.take(request.num_asked_tokens)
        return request if quota is None else replace(request, quota=quota)

    def open(self, request: GenerationRequest) -> Session:
        """A session to enter, by the caller's own task; entering raises TooManyInFlightError. Raises UnavailableError,
        AlreadyExistsError, ResourceExhaustedError.
        """
        self._check_available()
        if request.request_id in self._sessions:
            raise AlreadyExistsError(f"a request with the id {request.request_id} is in progress")
        limit = self.settings.max_concurrent_requests
        if self._num_answers + request.num_answers > limit:
            self.metrics.admission_rejected("max_concurrent_requests")
            raise ResourceExhaustedError(
                f"{limit} answers are in progress (max_concurrent_requests)", retry_after_ms=DEFAULT_RETRY_MS
            )
        session = Session(
            request,
            self._link,
            self.text,
            self.metrics,
            max_buffered_tokens=self.settings.max_buffered_tokens,
            timeout_s=self.settings.request_timeout,
            places=self._in_flight.places(request.num_answers),
            on_close=lambda: self._closed(request),
        )
        self._sessions[request.request_id] = session
        self._num_answers += request.num_answers
        self._idle.clear()
        return session

    def abort(self, request_id: str) -> bool:
        """False when this gateway has no live request of that id."""
        session = self._sessions.get(request_id)
        if session is None or not session.num_open:
            return False
        session.abort()
        return True

    def start_draining(self) -> None:
        """From now on no request is accepted; those in progress go on."""
        self._draining = True

    async def drained(self, timeout_s: float) -> bool:
        """Wait for the requests in progress; after `timeout_s` fail what is left. False when some were."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            for session in list(self._sessions.values()):
                session.fail(UnavailableError(DRAINING, retry_after_ms=DEFAULT_RETRY_MS), "abort")
            return False
        return True

    def _check_available(self) -> None:
        if self._draining:
            raise UnavailableError(DRAINING, retry_after_ms=DEFAULT_RETRY_MS)
        if not self.view.connected:
            raise UnavailableError(NOT_CONNECTED, retry_after_ms=DEFAULT_RETRY_MS)

    def _closed(self, request: GenerationRequest) -> None:
        del self._sessions[request.request_id]
        self._num_answers -= request.num_answers
        if not self._sessions:
            self._idle.set()
