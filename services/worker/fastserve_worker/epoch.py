"""Everything in flight at one stage in one epoch. It ends as a whole, so nothing of it can reach the next one."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from fastserve.v1 import stage_pb2
from fastserve_common.errors import FastServeError
from fastserve_worker import codec
from fastserve_worker.assembly import ActivationAssembly
from fastserve_worker.backend import StageBackend, Turn
from fastserve_worker.errors import PlanError
from fastserve_worker.forward import ForwardLink
from fastserve_worker.messages import Activations, Computed, Plan
from fastserve_worker.meter import NO_METER, Meter
from fastserve_worker.ranks.errors import TurnOverError
from fastserve_worker.ranks.followers import Followers
from fastserve_worker.ranks.swap_reports import SwapReports
from fastserve_worker.runner import StageRunner
from fastserve_worker.swap.copier import Copier, Copy
from fastserve_worker.swap.host_slab import HostSlab
from fastserve_worker.swap.orders import AwaitedCopies, SwapOrders

log = logging.getLogger(__name__)

#: Plans taken and not yet answered. The scheduler keeps as many in flight as there are stages.
MAX_PLANS_IN_FLIGHT = 32
#: Activations received, in part or whole, and not yet computed.
MAX_QUEUED_ACTIVATION_BYTES = 2 * 1024**3

Report = Callable[[stage_pb2.StageMessage], None]


class EpochRun:
    """Takes plans and activations in order of arrival, computes them in that order, passes the results on.

    The first fault ends the run: the KV of the jobs in the failed plan is wrong from then on, and the stages behind
    wait for activations that will not come. Every later plan is answered with a fault too, until a higher epoch.
    """

    def __init__(
        self,
        epoch: int,
        *,
        backend: StageBackend,
        runner: StageRunner,
        copier: Copier,
        host: Callable[[], HostSlab | None],
        next_address: str,
        report: Report,
        meter: Meter = NO_METER,
        followers: Followers | None = None,
        on_broken: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`host` gives the slab that a plan's slots are in, at the time when it comes. `followers`: the other ranks of
        this stage, where this is rank 0. `on_broken` hears of what leaves the ranks at odds."""
        self.epoch = epoch
        #: Whether the stage before has opened its stream.
        self.joined = False
        self._backend = backend
        self._info = backend.info
        self._runner = runner
        self._copier = copier
        self._host = host
        self._report = report
        self._meter = meter
        self._failure = ""
        self._last_seq = -1
        self._in_flight = 0
        self._queued_bytes = 0
        #: Plans whose activations are not all here yet.
        self._waiting: deque[ActivationAssembly] = deque()
        self._computing: asyncio.Queue[tuple[Plan, int, asyncio.Future[Computed]]] = asyncio.Queue()
        self._swaps = SwapOrders(copier, self._info.num_blocks, self._report_swap)
        self._followers, self._on_broken = followers, on_broken
        self._swap_reports = SwapReports(self._info.num_ranks)
        self._num_points = 0
        #: Set while no plan is in flight here.
        self.idle = asyncio.Event()
        self.idle.set()
        self._link: ForwardLink | None = None
        if next_address:
            self._link = ForwardLink(
                next_address, epoch=epoch, from_stage=self._info.stage, on_broken=partial(self.fail, 0)
            )
        self._task = asyncio.create_task(self._finish(), name=f"epoch-{epoch}")

    def take_plan(self, message: stage_pb2.IterationPlan) -> None:
        """Pass the plan on and start its copies; compute it at once on the first stage, else when its activations
        are here.

        Raises PlanError when it cannot be taken; the scheduler has been told by then.
        """
        try:
            self._admit(message)
        except (PlanError, FastServeError) as error:
            self._refuse(message.seq, message.epoch, str(error))
            raise PlanError(str(error)) from error

    def take_part(self, message: stage_pb2.ActivationChunk) -> bool:
        """Whether this piece completes the activations of a plan. Raises PlanError as `take_plan` does."""
        part = codec.decode_part(message)
        try:
            self._check_alive(part.epoch)
            if not self._waiting:
                raise PlanError(f"activations of plan {part.seq} came without a plan")
            assembly = self._waiting[0]
            activations = assembly.add(part)
            if activations is None:
                return False
            self._waiting.popleft()
            self._compute(assembly.plan, activations)
        except (PlanError, FastServeError) as error:
            self._refuse(part.seq, part.epoch, str(error))
            raise PlanError(str(error)) from error
        return True

    def fail(self, seq: int, message: str) -> None:
        """End the run and tell the scheduler. `seq` 0: no single plan is to blame."""
        log.warning("stage fault: %s", message, extra={"seq": seq, "epoch": self.epoch})
        self._swaps.stop()
        if not self._failure:
            self._meter.faulted()
        self._failure = self._failure or message
        self._report(codec.fault(seq, self.epoch, message))

    def next_point(self) -> Turn:
        """The turn of one more profile point, after every plan that has come."""
        self._num_points += 1
        return self.epoch, self._last_seq, self._num_points

    def swapped_elsewhere(self, part: stage_pb2.SwapReport) -> None:
        """Another rank has made its part of a swap."""
        if part.epoch == self.epoch:
            self._merge(part)

    def abandon(self) -> None:
        """A higher epoch is here: nothing of this run is started, passed on or reported from now on."""
        self._failure = self._failure or f"epoch {self.epoch} is over"
        self._report = _drop
        self._swaps.stop()
        self._task.cancel()
        if self._link:
            self._link.abandon()
        while not self._computing.empty():
            self._computing.get_nowait()[2].cancel()

    async def wait_closed(self) -> None:
        """Until nothing of this run reads or writes a block or a slot any more, but the plan that computes."""
        await asyncio.gather(self._task, return_exceptions=True)
        await self._swaps.wait_landed()
        if self._link:
            await self._link.wait_closed()

    def _admit(self, message: stage_pb2.IterationPlan) -> None:
        self._check_alive(message.epoch)
        if message.seq <= self._last_seq:
            raise PlanError(f"plan {message.seq} came after plan {self._last_seq}")
        if self._in_flight >= MAX_PLANS_IN_FLIGHT:
            raise PlanError(f"more than {MAX_PLANS_IN_FLIGHT} plans in flight at this stage")
        plan = codec.decode_plan(message, self._info)
        num_bytes = 0 if self._info.takes_bare_plans else self._info.activation_bytes(plan.num_tokens)
        if self._queued_bytes + num_bytes > MAX_QUEUED_ACTIVATION_BYTES:
            raise PlanError(f"more than {MAX_QUEUED_ACTIVATION_BYTES} bytes of activations wait for this stage")
        self._swaps.check(plan)
        self._last_seq, self._num_points = plan.seq, 0
        self._in_flight += 1
        self.idle.clear()
        self._queued_bytes += num_bytes
        if self._followers:
            self._followers.send_plan(message)
        if self._link:
            codec.strip_token_ids(message)
            self._link.send_plan(message)
        self._swaps.take(plan, self._host())
        if self._info.takes_bare_plans:
            self._compute(plan, None)
        else:
            self._waiting.append(ActivationAssembly(plan, self._info))

    def _refuse(self, seq: int, epoch: int, message: str) -> None:
        """A message of another epoch is answered, but it does no harm to this one."""
        if epoch == self.epoch:
            self.fail(seq, message)
        else:
            self._report(codec.fault(seq, epoch, message))

    def _check_alive(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise PlanError(f"a message of epoch {epoch} came, this stage is at epoch {self.epoch}")
        if self._failure:
            raise PlanError(f"epoch {self.epoch} ended with a fault: {self._failure}")

    def _compute(self, plan: Plan, activations: Activations | None) -> None:
        future = self._runner.submit(partial(self._carry_out, plan, activations, self._swaps.awaited_by(plan)))
        future.add_done_callback(self._count_computed)
        self._computing.put_nowait((plan, activations.compute_ns if activations else 0, future))

    def _carry_out(self, plan: Plan, activations: Activations | None, copies: AwaitedCopies) -> Computed:
        """On the stage's thread."""
        wait_ns = copies.wait()
        self._copier.blocked_ns += wait_ns
        begin_ns = time.monotonic_ns()
        output = self._backend.run(plan, activations)
        self._meter.computed(plan, output.compute_ns, wait_ns)
        return Computed(output, begin_ns, wait_ns)

    def _count_computed(self, future: "asyncio.Future[Computed]") -> None:
        if not future.cancelled() and future.exception() is None:
            self._swaps.computed()

    def _report_swap(self, copy: Copy) -> None:
        report = codec.swap_report(self.epoch, self._info.stage, copy)
        if self._followers:
            self._merge(report.swap)
        else:
            self._report(report)

    def _merge(self, part: stage_pb2.SwapReport) -> None:
        whole = self._swap_reports.add(part)
        if whole is not None:
            self._report(stage_pb2.StageMessage(swap=whole))

    async def _finish(self) -> None:
        """Results leave in the order their plans came. The next iteration computes while one is passed on."""
        while True:
            plan, upstream_ns, future = await self._computing.get()
            try:
                computed = await future
            except TurnOverError as error:
                # Rank 0 could not begin it, or dropped it with its epoch, and has gone on to one behind it.
                log.debug("left out plan %d: %s", plan.seq, error)
            except Exception as error:
                log.debug("a plan failed", exc_info=error)
                self.fail(plan.seq, f"plan {plan.seq} failed: {type(error).__name__}: {error}")
                self._check_ranks(error)
            else:
                await self._pass_on(plan, upstream_ns, computed)
            self._in_flight -= 1
            if not self._in_flight:
                self.idle.set()
            if not self._info.takes_bare_plans:
                self._queued_bytes -= self._info.activation_bytes(plan.num_tokens)

    def _check_ranks(self, error: Exception) -> None:
        """A rank that fails where others go on leaves them waiting. Rank 0 tells them when it goes on itself."""
        if self._followers and isinstance(error, PlanError):
            return
        if self._info.num_ranks > 1:
            self._on_broken(f"rank {self._info.rank} failed in an iteration: {error}")

    async def _pass_on(self, plan: Plan, upstream_ns: int, computed: Computed) -> None:
        """Activations first: the next stage waits for them. A result computed behind a fault goes nowhere."""
        if self._failure:
            return
        output = computed.output
        total_ns = upstream_ns + output.compute_ns
        if self._link:
            shape = (plan.num_tokens, self._info.hidden_size)
            activations = Activations(self._info.hidden_dtype, shape, output.hidden, total_ns)
            begin_ns = time.perf_counter_ns()
            await self._link.send_activations(plan.seq, activations)
            self._meter.sent(time.perf_counter_ns() - begin_ns)
        self._report(codec.report(plan, self._info, computed, total_ns))


def _drop(message: stage_pb2.StageMessage) -> None:
    """Nobody is there to hear what an epoch that is over has to say."""
