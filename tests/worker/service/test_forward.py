"""The link to the next stage: what breaks it, and that it says so once."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from fastserve.v1 import stage_pb2, stage_pb2_grpc
from fastserve_common.channels import GrpcServer
from fastserve_common.errors import Context, ResourceExhaustedError
from fastserve_worker.forward import MAX_QUEUED_MESSAGES, ForwardLink
from fastserve_worker.messages import Activations


class _Peer(stage_pb2_grpc.StageServicer):
    """Notes what arrives; acknowledges the first `num_acks` tensors."""

    def __init__(self, num_acks: int) -> None:
        self.num_acks = num_acks
        self.received: list[stage_pb2.ForwardMessage] = []

    async def Control(
        self, request_iterator: AsyncIterator[stage_pb2.ControlMessage], context: Context
    ) -> AsyncIterator[stage_pb2.StageMessage]:
        return
        yield

    async def Forward(
        self, request_iterator: AsyncIterator[stage_pb2.ForwardMessage], context: Context
    ) -> AsyncIterator[stage_pb2.ForwardAck]:
        async for message in request_iterator:
            self.received.append(message)
            if message.HasField("activations") and self.num_acks:
                self.num_acks -= 1
                yield stage_pb2.ForwardAck(seq=message.activations.seq)


async def _serve(peer: _Peer) -> tuple[GrpcServer, str]:
    server = GrpcServer.create(())
    stage_pb2_grpc.add_StageServicer_to_server(peer, server.server)
    return server, f"127.0.0.1:{await server.start('127.0.0.1:0')}"


async def _broken(address: str, ack_timeout_s: float, num_tensors: int) -> str:
    """Why a link broke that was given some tensors."""
    broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    link = ForwardLink(
        address,
        epoch=1,
        from_stage=0,
        on_broken=broken.set_result,  # a second call would raise
        connect_timeout_s=0.3,
        ack_timeout_s=ack_timeout_s,
    )
    link.send_plan(stage_pb2.IterationPlan(seq=1, epoch=1))
    for seq in range(num_tensors):
        await link.send_activations(seq, Activations("float32", (1, 2), bytes(8), 5))
    async with asyncio.timeout(20):
        reason = await broken
    await link.wait_closed()
    return reason


async def test_a_next_stage_that_does_not_listen(unused_tcp_port: int) -> None:
    reason = await _broken(f"127.0.0.1:{unused_tcp_port}", 10, 0)
    assert "no connection within 0.3 s" in reason


@pytest.mark.parametrize("num_acks", [0, 1])
async def test_a_next_stage_that_does_not_take_activations(num_acks: int) -> None:
    peer = _Peer(num_acks)
    server, address = await _serve(peer)
    try:
        assert "not taken within 0.3 s" in await _broken(address, 0.3, 2)
    finally:
        await server.stop(0)
    kinds = [message.WhichOneof("message") for message in peer.received]
    assert kinds == ["hello", "plan", "activations", "activations"]


async def test_plans_for_a_stage_that_does_not_keep_up_are_limited(unused_tcp_port: int) -> None:
    link = ForwardLink(f"127.0.0.1:{unused_tcp_port}", epoch=1, from_stage=0, on_broken=lambda _: None)
    for seq in range(MAX_QUEUED_MESSAGES):
        link.send_plan(stage_pb2.IterationPlan(seq=seq))
    with pytest.raises(ResourceExhaustedError, match="wait for the next stage"):
        link.send_plan(stage_pb2.IterationPlan())
    link.abandon()
    await link.wait_closed()
