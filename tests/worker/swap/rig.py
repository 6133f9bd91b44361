"""The scheduler's side of swapping, as small as it can be, over real gRPC and over real shared memory."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from fastserve.v1 import kvstore_pb2, kvstore_pb2_grpc, stage_pb2
from fastserve_common.channels import GrpcServer, full_names
from fastserve_common.packed import pack_u32
from fastserve_common.state import StateStore, membership
from fastserve_kvstore.arena import Arena
from fastserve_kvstore.service import KvStoreService
from fastserve_kvstore.store import HostStore
from fastserve_worker.fake_stage import FakeOptions, FakeStage, FakeStageServer

from ..service.rig import Job, Pipeline, StageClient, apply  # noqa: TID252 - the same scheduler, before it swapped

__all__ = ["IN", "NODE", "OUT", "Heard", "Job", "Pipeline", "Swapper", "apply", "kvstore", "swapping_fakes"]

OUT, IN = stage_pb2.SWAP_DIRECTION_OUT, stage_pb2.SWAP_DIRECTION_IN
NODE = "node"


@dataclass
class Heard:
    """What one stage said, sorted."""

    iterations: list[stage_pb2.IterationReport] = field(default_factory=list)
    swaps: dict[int, stage_pb2.SwapReport] = field(default_factory=dict)

    async def until(self, client: StageClient, num_iterations: int = 0, num_swaps: int = 0) -> "Heard":
        """Read on until at least so many of each have come; anything else fails the test."""
        while len(self.iterations) < num_iterations or len(self.swaps) < num_swaps:
            message = await client.answer()
            kind = message.WhichOneof("message")
            assert kind in ("iteration", "swap"), message
            if kind == "iteration":
                self.iterations.append(message.iteration)
            else:
                assert message.swap.swap_id not in self.swaps
                self.swaps[message.swap.swap_id] = message.swap
        return self


@dataclass
class Swapper:
    """Makes plans with swaps for the stages of a pipeline."""

    pipeline: Pipeline
    generation: int = 0
    swap_id: int = 0

    def op(self, direction: int, job_id: int, blocks: Sequence[int], slots: Sequence[int]) -> stage_pb2.SwapOp:
        self.swap_id += 1
        return stage_pb2.SwapOp(
            swap_id=self.swap_id,
            job_id=job_id,
            direction=stage_pb2.SwapDirection.ValueType(direction),
            device_blocks=pack_u32(blocks),
            host_slots=pack_u32(slots),
        )

    async def send(self, items: Sequence[stage_pb2.PlanItem], *swaps: stage_pb2.SwapOp) -> stage_pb2.IterationPlan:
        plan = self.pipeline.plan(items)
        plan.swaps.extend(swaps)
        plan.host_generation = self.generation
        await self.pipeline.first.send_plan(plan)
        return plan

    async def run(self, jobs: Sequence[Job], *swaps: stage_pb2.SwapOp) -> list[stage_pb2.SwapReport]:
        """One iteration of `jobs` with `swaps`; waits until all stages have reported all of it."""
        items = [job.item() for job in jobs]
        await self.send(items, *swaps)
        heard = [await Heard().until(client, 1, len(swaps)) for client in self.pipeline.clients]
        apply(jobs, items, heard[-1].iterations[0])
        return [report for stage in heard for report in stage.swaps.values()]


@contextlib.asynccontextmanager
async def swapping_fakes(
    num_stages: int, num_host_slots: int, options: FakeOptions | None = None
) -> AsyncIterator[tuple[Swapper, list[FakeStageServer]]]:
    async with contextlib.AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(
                FakeStageServer(FakeStage(stage=i, num_stages=num_stages, options=options), num_host_slots)
            )
            for i in range(num_stages)
        ]
        pipeline = await stack.enter_async_context(Pipeline([server.address for server in servers]))
        yield Swapper(pipeline), servers


@contextlib.asynccontextmanager
async def kvstore(state: StateStore, kv_bytes: int, start_number: int = 1) -> AsyncIterator[HostStore]:
    """A node's daemon in this process: real shared memory, real gRPC, registered while the block runs."""
    arena = Arena.open(kv_bytes)
    store = HostStore(arena.kv_bytes, start_number, lease_ttl_ns=10**12)
    server = GrpcServer.create(full_names(kvstore_pb2.DESCRIPTOR))
    kvstore_pb2_grpc.add_KvStoreServicer_to_server(KvStoreService(store, arena), server.server)
    port = await server.start("127.0.0.1:0")
    facts = {"address": f"127.0.0.1:{port}", "segment": arena.name, "generation": str(store.generation)}
    try:
        async with membership(state, "kvstore", NODE, facts):
            yield store
    finally:
        await server.stop(0.1)
        arena.close()
