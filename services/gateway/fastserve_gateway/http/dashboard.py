"""What the built-in page shows: this gateway's counts and the scheduler's state, looked at once a second at most."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import grpc.aio

from fastserve.v1 import scheduler_pb2 as pb
from fastserve_gateway.engine.engine import Engine
from fastserve_gateway.engine.link import LinkLostError
from fastserve_gateway.http.dashboard_shapes import (
    BlockCounts,
    DashboardState,
    GatewayCounts,
    LatencyBuckets,
    LevelCounts,
    PipelineState,
    SchedulerLinkState,
    StageCondition,
    SwapCounts,
)

#: However many look, the scheduler is asked no more often than this.
MIN_INTERVAL_S = 1.0
#: What the page waits for the scheduler before it says that there is no answer.
ASK_TIMEOUT_S = 2.0

_NS_PER_MS = 1e6


@dataclass(frozen=True, slots=True)
class _Look:
    taken_s: float
    state: DashboardState


class Dashboard:
    """Shared by all viewers; the look in progress is everybody's."""

    def __init__(self, engine: Engine, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._last: _Look | None = None
        self._looking = asyncio.Lock()

    async def state(self) -> DashboardState:
        async with self._looking:
            if self._last is None or self._clock() - self._last.taken_s >= MIN_INTERVAL_S:
                pipeline = await self._ask()
                self._last = _Look(self._clock(), self._assemble(pipeline))
            return self._last.state

    async def _ask(self) -> PipelineState | None:
        """None: the scheduler is away, or does not answer."""
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                return _pipeline(await self._engine.scheduler_state())
        except (LinkLostError, TimeoutError, grpc.aio.AioRpcError):
            return None

    def _assemble(self, pipeline: PipelineState | None) -> DashboardState:
        engine, view = self._engine, self._engine.view
        metrics, totals = engine.metrics, engine.metrics.totals()
        return DashboardState(
            time=time.time(),
            model=engine.settings.model_names[0],
            scheduler=SchedulerLinkState(
                connected=view.connected,
                ready=view.serving,
                detail="" if view.serving else view.detail,
                generation=view.generation,
                max_model_len=engine.max_model_len,
            ),
            gateway=GatewayCounts(
                running=engine.num_running,
                waiting=engine.num_waiting,
                accepted=totals["accepted"],
                outcomes=metrics.outcomes(),
                prompt_tokens=totals["prompt_tokens"],
                generation_tokens=totals["tokens"],
            ),
            latency={
                name: LatencyBuckets(bounds=bounds, counts=counts)
                for name, (bounds, counts) in metrics.latencies().items()
            },
            pipeline=pipeline,
        )


def _pipeline(state: pb.GetStateResponse) -> PipelineState:
    return PipelineState(
        policy=state.policy,
        levels=[
            LevelCounts(
                level=level.level,
                quantum_ms=level.quantum_ns / _NS_PER_MS,
                waiting=level.waiting,
                running=level.running,
            )
            for level in state.levels
        ],
        running=state.running,
        waiting=state.waiting,
        swapped=state.swapped,
        batches_in_flight=state.batches_in_flight,
        longest_wait_ms=state.longest_wait_ms,
        device_blocks=BlockCounts(total=state.device_blocks_total, free=state.device_blocks_free),
        host_blocks=BlockCounts(total=state.host_blocks_total, free=state.host_blocks_free),
        swaps=SwapCounts(
            in_flight=state.swaps_in_flight,
            out=state.swaps_out,
            out_bytes=state.swap_bytes_out,
            into=state.swaps_in,
            into_bytes=state.swap_bytes_in,
        ),
        stages=[
            StageCondition(
                stage=stage.stage,
                up=stage.up,
                address=stage.address,
                last_iteration_ms=stage.last_iteration_ns / _NS_PER_MS,
            )
            for stage in state.stages
        ],
        iterations=state.iterations,
        tokens_generated=state.tokens_generated,
        preemptions=state.preemptions,
        promotions=state.promotions,
        demotions=state.demotions,
    )
