"""One stage between its streams: which epoch it is at, which scheduler it answers to, what is in flight."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from functools import partial

from fastserve.v1 import stage_pb2
from fastserve_common.errors import (
    AlreadyExistsError,
    FastServeError,
    InvalidArgumentError,
    ResourceExhaustedError,
)
from fastserve_worker import codec
from fastserve_worker.backend import StageBackend
from fastserve_worker.epoch import EpochRun
from fastserve_worker.errors import PlanError, StaleEpochError
from fastserve_worker.messages import ProfilePoint
from fastserve_worker.meter import NO_METER, Meter
from fastserve_worker.ranks.errors import TurnOverError
from fastserve_worker.ranks.followers import Followers
from fastserve_worker.runner import StageRunner
from fastserve_worker.swap.copier import Copier
from fastserve_worker.swap.host_slab import HostSlab

log = logging.getLogger(__name__)

#: Reports that wait for a scheduler that does not read.
MAX_QUEUED_REPORTS = 4096


class ControlSession:
    """What goes back on one Control stream, in order, until it ends."""

    def __init__(self) -> None:
        self._messages: deque[stage_pb2.StageMessage] = deque()
        self._wake = asyncio.Event()
        self._ended = False
        self._error: FastServeError | None = None

    def send(self, message: stage_pb2.StageMessage) -> None:
        """Never waits: a scheduler that does not read loses its stream, not the stage its time."""
        if self._ended:
            return
        if len(self._messages) >= MAX_QUEUED_REPORTS:
            self.end(ResourceExhaustedError(f"more than {MAX_QUEUED_REPORTS} reports were not read"))
            return
        self._messages.append(message)
        self._wake.set()

    def end(self, error: FastServeError | None = None) -> None:
        """The first end counts."""
        if not self._ended:
            self._ended, self._error = True, error
            self._wake.set()

    async def messages(self) -> AsyncIterator[stage_pb2.StageMessage]:
        """What was sent before the end is still given out. Raises the error that ended the session, if any."""
        while True:
            while self._messages:
                yield self._messages.popleft()
            if self._ended:
                break
            self._wake.clear()
            await self._wake.wait()
        if self._error:
            raise self._error


class Stage:
    """Owns the epoch. A scheduler takes the stage over by configuring a higher one."""

    def __init__(self, backend: StageBackend, runner: StageRunner, copier: Copier, meter: Meter = NO_METER) -> None:
        self.info = backend.info
        self.copier = copier
        self._backend = backend
        self._runner = runner
        self._meter = meter
        self._host: HostSlab | None = None
        self._epoch = 0
        #: Epochs so far: each is one joining of the pipeline.
        self.num_epochs = 0
        self._session: ControlSession | None = None
        self._run: EpochRun | None = None
        self._abandoned: list[EpochRun] = []
        self._profiling: asyncio.Task[None] | None = None
        self._configuring = asyncio.Lock()
        self._configured = asyncio.Condition()
        self._followers: Followers | None = None
        #: Why the ranks of this stage cannot go on together, once they cannot.
        self.broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def lead(self, followers: Followers) -> None:
        """This is rank 0 of several: before it is found by others."""
        self._followers = followers
        followers.on_swap = self._swapped_elsewhere
        followers.on_arena = self._tell_host

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def host(self) -> HostSlab | None:
        """What it swaps with; None: nothing, or not every rank with the same."""
        slab, followers = self._host, self._followers
        if slab is None or followers is None or followers.attached_to((slab.generation, slab.num_slots)):
            return slab
        return None

    async def configure(self, order: stage_pb2.Configure, session: ControlSession) -> None:
        """Drop everything older, then answer StageReady: by then nothing older computes here any more.

        Raises StaleEpochError unless the epoch is higher than every one before.
        """
        if bool(order.next_stage_address) != self.info.sends_on:
            raise InvalidArgumentError(f"stage {self.info.stage} of {self.info.num_stages}: wrong next_stage_address")
        self._claim(order.epoch, session)
        async with self._configuring:
            if self._epoch != order.epoch:
                return  # a still higher one came while this one waited
            await self._wait_abandoned()
            if self._followers:
                await self._runner.submit(_nothing)  # until then they are needed where they are
                self._followers.configure(order.epoch)
            await self._runner.submit(partial(self._backend.start_epoch, order.epoch))
            if self._followers:
                await self._followers.wait_ready()
            if self._epoch != order.epoch:
                return
            self._run = EpochRun(
                order.epoch,
                backend=self._backend,
                runner=self._runner,
                copier=self.copier,
                host=lambda: self._host,
                next_address=order.next_stage_address,
                report=session.send,
                meter=self._meter,
                followers=self._followers,
                on_broken=self.break_up,
            )
            session.send(codec.ready(order.epoch, self.info, self.host))
        async with self._configured:
            self._configured.notify_all()
        log.info("configured", extra={"epoch": order.epoch, "next_stage": order.next_stage_address})

    def use_host(self, slab: HostSlab) -> None:
        """Plans that come from now on swap with `slab`; copies under way end where they began.

        The backend has attached to it by then. A scheduler that configured this stage is told.
        """
        self._host = slab
        self._tell_host()

    def _tell_host(self) -> None:
        if self._run is not None and self._session is not None:
            self._session.send(codec.host_arena(self.host))

    def _swapped_elsewhere(self, part: stage_pb2.SwapReport) -> None:
        if self._run is not None:
            self._run.swapped_elsewhere(part)

    def break_up(self, why: str) -> None:
        """The ranks of this stage cannot go on together; the first reason counts."""
        if not self.broken.done():
            self.broken.set_result(why)

    def _claim(self, epoch: int, session: ControlSession) -> None:
        """At once, before anything is waited for: from here on no older message does anything."""
        if epoch <= self._epoch:
            raise StaleEpochError(f"epoch {epoch} is not above epoch {self._epoch}, where this stage is")
        self._epoch = epoch
        self.num_epochs += 1
        if self._session is not None and self._session is not session:
            self._session.end(StaleEpochError(f"another scheduler configured epoch {epoch}"))
        self._session = session
        self._abandon_run()

    def take_plan(self, plan: stage_pb2.IterationPlan, session: ControlSession) -> None:
        """A plan that cannot be taken is answered with a fault on the session; the stream goes on."""
        if not self.info.takes_bare_plans:
            session.send(codec.fault(plan.seq, plan.epoch, "plans come to this stage from the one before it"))
        elif self._run is None or self._session is not session:
            session.send(codec.fault(plan.seq, plan.epoch, "this stage has not been configured by this scheduler"))
        else:
            try:
                self._run.take_plan(plan)
            except PlanError as error:
                log.debug("refused a plan: %s", error)

    def take_profile(self, order: stage_pb2.ProfileOrder, session: ControlSession) -> None:
        """Answered later on the session: the stream is read on meanwhile, and iterations run between the points.

        The order ends with its session and with its epoch.
        """
        if order.epoch != self._epoch or self._session is not session:
            reason = f"it is of epoch {order.epoch}, this stage is at epoch {self._epoch}"
        elif self.info.rank:
            self._compute_with_rank_0(order, session)
            return
        elif self._profiling is not None and not self._profiling.done():
            reason = "another one is in progress"
        else:
            self._profiling = asyncio.create_task(self._profile(order, session), name="profile")
            return
        session.send(codec.fault(0, order.epoch, f"profile order {order.profile_id}: {reason}"))

    async def _profile(self, order: stage_pb2.ProfileOrder, session: ControlSession) -> None:
        compute_ns: list[int] = []
        try:
            for wire, point in zip(order.points, codec.decode_points(order), strict=True):
                compute_ns.append(await self._profile_point(order, wire, point))
        except Exception as error:
            log.warning("profile order failed", exc_info=error)
            session.send(codec.fault(0, order.epoch, f"profile order {order.profile_id}: {error}"))
            self._check_point(error)
        else:
            session.send(codec.profile_report(order.profile_id, self.info.stage, compute_ns))

    async def _profile_point(
        self, order: stage_pb2.ProfileOrder, wire: stage_pb2.ProfilePoint, point: ProfilePoint
    ) -> int:
        run = self._run
        if run is None:
            raise PlanError("this stage has not been configured")
        if self._followers:
            await run.idle.wait()  # their order is the one in which they are told
            self._followers.send_point(order, wire)
        return await self._runner.submit(partial(self._backend.profile, point, run.next_point()))

    def _compute_with_rank_0(self, order: stage_pb2.ProfileOrder, session: ControlSession) -> None:
        if self._run is None:
            return
        for point in codec.decode_points(order):
            done = self._runner.submit(partial(self._backend.profile, point, self._run.next_point()))
            done.add_done_callback(self._computed_with_rank_0)

    def _computed_with_rank_0(self, done: "asyncio.Future[int]") -> None:
        error = None if done.cancelled() else done.exception()
        if error is not None:
            log.debug("a profile point failed", exc_info=error)
            self._check_point(error)

    def _check_point(self, error: BaseException) -> None:
        """A point that can never run is refused by every rank before it waits for anybody; other failures leave the
        others waiting."""
        if self.info.num_ranks > 1 and not isinstance(error, ValueError | TurnOverError):
            self.break_up(f"rank {self.info.rank} failed in a profile: {error}")

    async def join(self, hello: stage_pb2.ForwardHello) -> EpochRun:
        """The run that a stream from the stage before belongs to. Waits until this stage is at that epoch too.

        Raises StaleEpochError when the epoch is over, AlreadyExistsError when it has been joined.
        """
        if hello.from_stage + 1 != self.info.stage:
            raise InvalidArgumentError(f"stage {hello.from_stage} is not before stage {self.info.stage}")
        async with self._configured:
            await self._configured.wait_for(
                lambda: self._epoch > hello.epoch or (self._epoch == hello.epoch and self._run is not None)
            )
        run = self._run
        if run is None or run.epoch != hello.epoch:
            raise StaleEpochError(f"epoch {hello.epoch} is over; this stage is at epoch {self._epoch}")
        if run.joined:
            raise AlreadyExistsError(f"the stage before has opened its stream of epoch {hello.epoch} already")
        run.joined = True
        return run

    def detach(self, session: ControlSession) -> None:
        """The stream is gone: what is in flight goes on, what it reports goes nowhere."""
        session.end()
        if self._session is session:
            self._session = None
            if self._profiling is not None:
                self._profiling.cancel()
        if self.info.rank:
            self.break_up("rank 0 is gone")

    async def close(self, error: FastServeError) -> None:
        """End the session with `error` and everything in flight."""
        if self._session:
            self._session.end(error)
        self._abandon_run()
        await self._wait_abandoned()

    def _abandon_run(self) -> None:
        if self._profiling is not None:
            self._profiling.cancel()
        if self._run is not None:
            self._run.abandon()
            self._abandoned.append(self._run)
            self._run = None

    async def _wait_abandoned(self) -> None:
        while self._abandoned:
            await self._abandoned.pop().wait_closed()


def _nothing() -> None:
    """Runs when everything before it has."""
