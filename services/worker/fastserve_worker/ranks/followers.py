"""Rank 0's side: one Control stream to each other rank, which takes it for its scheduler."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import cast

import grpc
import grpc.aio

from fastserve.v1 import stage_pb2, stage_pb2_grpc
from fastserve_common.channels import open_channel
from fastserve_worker.ranks.errors import RankLostError

#: (generation, slots) of the arena that a rank is attached to; (0, 0): none.
Arena = tuple[int, int]

NO_ARENA: Arena = (0, 0)


class Followers:
    """`run` it; everything else is for the stage that rank 0 is. What is sent before the streams are open waits."""

    def __init__(self, addresses: Sequence[str]) -> None:
        """`addresses` of rank 1, 2, ..."""
        self._links = [_Link(rank, address) for rank, address in enumerate(addresses, 1)]
        self._arenas = [NO_ARENA] * len(self._links)
        self._epoch = 0
        self._ready: set[int] = set()
        self._all_ready = asyncio.Event()
        #: A swap of another rank has ended.
        self.on_swap: Callable[[stage_pb2.SwapReport], None] = lambda _: None
        #: Another rank is attached to other host memory than before.
        self.on_arena: Callable[[], None] = lambda: None

    async def run(self) -> None:
        """Until cancelled. Raises RankLostError when a rank is gone or has failed."""
        tasks = [asyncio.create_task(link.run(self._heard), name=f"rank-{link.rank}") for link in self._links]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def configure(self, epoch: int) -> None:
        """Everything older is over, once they are ready."""
        self._epoch = epoch
        self._ready.clear()
        self._all_ready.clear()
        self._send(stage_pb2.ControlMessage(configure=stage_pb2.Configure(epoch=epoch)))

    async def wait_ready(self) -> None:
        """For the last epoch that they were configured for."""
        await self._all_ready.wait()

    def send_plan(self, plan: stage_pb2.IterationPlan) -> None:
        """`plan` may be changed afterwards."""
        message = stage_pb2.ControlMessage()
        message.plan.CopyFrom(plan)
        self._send(message)

    def send_point(self, order: stage_pb2.ProfileOrder, point: stage_pb2.ProfilePoint) -> None:
        """One point of `order`, which they compute with rank 0."""
        one = stage_pb2.ProfileOrder(profile_id=order.profile_id, epoch=order.epoch, points=[point])
        self._send(stage_pb2.ControlMessage(profile=one))

    def attached_to(self, arena: Arena) -> bool:
        """All of them swap with this one."""
        return all(known == arena for known in self._arenas)

    def _send(self, message: stage_pb2.ControlMessage) -> None:
        for link in self._links:
            link.outbox.put_nowait(message)

    def _heard(self, rank: int, message: stage_pb2.StageMessage) -> None:
        match message.WhichOneof("message"):
            case "ready" if message.ready.epoch == self._epoch:
                self._ready.add(rank)
                if len(self._ready) == len(self._links):
                    self._all_ready.set()
                self._attached(rank, (message.ready.host_generation, message.ready.num_host_slots))
            case "host":
                self._attached(rank, (message.host.generation, message.host.num_slots))
            case "swap" if message.swap.epoch == self._epoch:
                self.on_swap(message.swap)
            case "fault" if message.fault.epoch == self._epoch:
                raise RankLostError(f"rank {rank} failed: {message.fault.message}")
            case _:
                pass  # its reports of iterations tell nothing that rank 0 does not know

    def _attached(self, rank: int, arena: Arena) -> None:
        if self._arenas[rank - 1] != arena:
            self._arenas[rank - 1] = arena
            self.on_arena()


class _Link:
    def __init__(self, rank: int, address: str) -> None:
        self.rank, self._address = rank, address
        #: Bounded by what the scheduler has in flight, as everything at this stage is.
        self.outbox: asyncio.Queue[stage_pb2.ControlMessage] = asyncio.Queue()

    async def run(self, heard: Callable[[int, stage_pb2.StageMessage], None]) -> None:
        try:
            async with open_channel(self._address) as channel:
                call = stage_pb2_grpc.StageStub(channel).Control()
                writer = asyncio.create_task(self._write(call), name=f"rank-{self.rank}-plans")
                try:
                    while (message := await call.read()) is not grpc.aio.EOF:
                        heard(self.rank, cast(stage_pb2.StageMessage, message))
                    why = await call.details() or (await call.code()).name.lower()
                finally:
                    writer.cancel()
                    with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                        await writer
        except grpc.aio.AioRpcError as error:
            why = error.details() or error.code().name.lower()
        raise RankLostError(f"lost rank {self.rank} at {self._address}: {why}")

    async def _write(self, call: "grpc.aio.StreamStreamCall[stage_pb2.ControlMessage, stage_pb2.StageMessage]") -> None:
        try:
            while True:
                await call.write(await self.outbox.get())
        except asyncio.InvalidStateError:
            pass  # the stream has ended; the reader says why
