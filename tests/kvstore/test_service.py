"""The gRPC face over a real server, with a real arena: sessions, leases, refusals, two processes on one slab."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import grpc
import grpc.aio
import pytest

from fastserve.v1 import kvstore_pb2 as pb
from fastserve.v1 import kvstore_pb2_grpc
from fastserve_common.channels import GrpcServer, full_names, open_channel
from fastserve_common.packed import pack_u32, unpack_u32
from fastserve_common.segments import SHM_DIR, attach
from fastserve_kvstore.arena import Arena
from fastserve_kvstore.metrics import make_registry
from fastserve_kvstore.service import KvStoreService
from fastserve_kvstore.store import HostStore

SLOT_BYTES = 4096
NUM_SLOTS = 8

WRITE_SLOT = """
import sys
from fastserve_common.segments import attach
name, offset, text = sys.argv[1], int(sys.argv[2]), sys.argv[3].encode()
with attach(name) as memory:
    memory[offset:offset + len(text)] = text
"""

Call = grpc.aio.StreamStreamCall[pb.KvCommand, pb.KvEvent]


@dataclass
class Rig:
    service: KvStoreService
    store: HostStore
    arena: Arena
    stub: "kvstore_pb2_grpc.KvStoreAsyncStub"

    async def attach(self, stage: int, fingerprint: str = "m", pipeline: int = 2 * SLOT_BYTES) -> pb.AttachResponse:
        layout = pb.KvLayout(model_fingerprint=fingerprint, stage=stage, slot_bytes=SLOT_BYTES)
        request = pb.AttachRequest(owner=f"stage-{stage}", layout=layout, pipeline_slot_bytes=pipeline)
        return await self.stub.Attach(request)

    async def connect(self, scheduler_id: str = "s", epoch: int = 1) -> tuple[Call, pb.KvReady]:
        call = self.stub.Control()
        await call.write(pb.KvCommand(hello=pb.KvHello(scheduler_id=scheduler_id, epoch=epoch)))
        return call, (await read(call)).ready

    async def counts(self) -> tuple[int, int, int]:
        status = await self.stub.GetStatus(pb.GetStatusRequest())
        return status.free_slots, status.reserved_slots, status.committed_slots

    async def until(self, counts: tuple[int, int, int]) -> None:
        async with asyncio.timeout(10):
            while await self.counts() != counts:  # noqa: ASYNC110 - polled over the wire
                await asyncio.sleep(0.005)


async def read(call: Call) -> pb.KvEvent:
    async with asyncio.timeout(10):
        event = await call.read()
    assert isinstance(event, pb.KvEvent), "the stream ended"
    return event


async def ended(call: Call) -> grpc.StatusCode:
    async with asyncio.timeout(10):
        return await call.code()


def lease(lease_id: int, num_slots: int) -> pb.KvCommand:
    return pb.KvCommand(lease=pb.LeaseSlots(lease_id=lease_id, num_slots=num_slots))


@pytest.fixture
def arena() -> Iterator[Arena]:
    opened = Arena.open(NUM_SLOTS * 2 * SLOT_BYTES)
    yield opened
    opened.close()


@pytest.fixture
async def rig(arena: Arena, request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    store = HostStore(arena.kv_bytes, start_number=1, lease_ttl_ns=getattr(request, "param", 60 * 10**9))
    service = KvStoreService(store, arena)
    server = GrpcServer.create(full_names(pb.DESCRIPTOR))
    kvstore_pb2_grpc.add_KvStoreServicer_to_server(service, server.server)
    port = await server.start("127.0.0.1:0")
    expiry = asyncio.create_task(service.expire_leases())
    async with open_channel(f"127.0.0.1:{port}") as channel:
        yield Rig(service, store, arena, kvstore_pb2_grpc.KvStoreStub(channel))
    expiry.cancel()
    service.close()
    await server.stop(0)
    store.ledger.check()


async def test_a_lease_is_committed_and_released_over_the_wire(rig: Rig) -> None:
    await rig.attach(0)
    await rig.attach(1)
    call, ready = await rig.connect()
    assert (ready.total_slots, ready.free_slots) == (NUM_SLOTS, NUM_SLOTS)
    await call.write(lease(1, 3))
    slots = (await read(call)).leased.host_slots
    assert list(unpack_u32(slots)) == [0, 1, 2]
    await call.write(pb.KvCommand(commit=pb.CommitSlots(lease_id=1, job_id=9, host_slots=slots[:8])))
    await call.write(pb.KvCommand(revoke=pb.RevokeSlots(lease_id=1, host_slots=slots[8:])))
    await rig.until((6, 0, 2))
    await call.write(pb.KvCommand(release=pb.ReleaseSlots(job_id=9, host_slots=slots[:8])))
    await rig.until((8, 0, 0))


async def test_refusals_name_the_lease_and_change_nothing(rig: Rig) -> None:
    await rig.attach(0)
    call, _ = await rig.connect()
    await call.write(lease(5, NUM_SLOTS + 1))
    refused = (await read(call)).refused
    assert refused.lease_id == 5
    assert "9 slots asked for, 8 of 8 are free" in refused.message
    await call.write(pb.KvCommand(release=pb.ReleaseSlots(job_id=1, host_slots=pack_u32([0]))))
    assert "not committed to job 1" in (await read(call)).refused.message
    assert await rig.counts() == (8, 0, 0)
    metrics = {
        s.name + str(s.labels.get("reason", "")): s.value
        for m in make_registry(rig.store, rig.arena).collect()
        for s in m.samples
    }
    assert metrics["fastserve_kvstore_refused_totalfull"] == 1
    assert metrics["fastserve_kvstore_refused_totalinvalid"] == 1


@pytest.mark.parametrize("rig", [50_000_000], indirect=True)
async def test_a_scheduler_that_neither_commits_nor_renews_loses_its_slots_and_is_told(rig: Rig) -> None:
    await rig.attach(0)
    call, _ = await rig.connect()
    await call.write(lease(1, 2))
    slots = (await read(call)).leased.host_slots
    expired = (await read(call)).expired
    assert (expired.lease_id, expired.host_slots) == (1, slots)
    await call.write(pb.KvCommand(commit=pb.CommitSlots(lease_id=1, job_id=9, host_slots=slots)))
    assert "it is free" in (await read(call)).refused.message
    assert await rig.counts() == (8, 0, 0)


async def test_the_same_scheduler_finds_its_slots_and_another_one_finds_none(rig: Rig) -> None:
    await rig.attach(0)
    first, _ = await rig.connect("a", 1)
    await first.write(lease(1, 2))
    slots = (await read(first)).leased.host_slots
    await first.write(pb.KvCommand(commit=pb.CommitSlots(lease_id=1, job_id=9, host_slots=slots)))
    await rig.until((6, 0, 2))
    first.cancel()
    again, ready = await rig.connect("a", 1)
    assert ready.free_slots == 6
    other, ready = await rig.connect("b", 2)
    assert ready.free_slots == 8
    assert await ended(again) == grpc.StatusCode.OK, "one stream at a time"
    late = rig.stub.Control()
    await late.write(pb.KvCommand(hello=pb.KvHello(scheduler_id="a", epoch=1)))
    assert await ended(late) == grpc.StatusCode.FAILED_PRECONDITION
    await other.write(lease(1, 1))
    assert (await read(other)).leased.lease_id == 1


@pytest.mark.parametrize(
    "first", [lease(1, 1), pb.KvCommand(), pb.KvCommand(hello=pb.KvHello(epoch=1))], ids=["lease", "empty", "anonymous"]
)
async def test_a_stream_that_does_not_say_hello_is_refused(rig: Rig, first: pb.KvCommand) -> None:
    call = rig.stub.Control()
    await call.write(first)
    assert await ended(call) == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "command",
    [
        pb.KvCommand(hello=pb.KvHello(scheduler_id="s")),
        pb.KvCommand(revoke=pb.RevokeSlots(lease_id=1, host_slots=b"abc")),
    ],
    ids=["second hello", "half a slot"],
)
async def test_a_broken_command_ends_the_stream_with_its_reason(rig: Rig, command: pb.KvCommand) -> None:
    call, _ = await rig.connect()
    await call.write(command)
    assert await ended(call) == grpc.StatusCode.INVALID_ARGUMENT
    call, _ = await rig.connect()  # and the service goes on
    assert await rig.counts() == (0, 0, 0)


async def test_a_command_of_a_later_version_is_ignored(rig: Rig) -> None:
    await rig.attach(0)
    call, _ = await rig.connect()
    await call.write(pb.KvCommand())
    await call.write(lease(1, 1))
    assert (await read(call)).leased.lease_id == 1


async def test_another_layout_raises_the_generation_and_the_scheduler_hears_of_it(rig: Rig) -> None:
    call, ready = await rig.connect()
    assert ready.total_slots == 0
    first = await rig.attach(0)
    assert (await read(call)).ready.total_slots == NUM_SLOTS
    assert (await rig.attach(0)) == first
    await call.write(lease(1, 2))
    await read(call)
    second = await rig.attach(0, fingerprint="another model")
    ready = (await read(call)).ready
    assert ready.generation == second.generation == first.generation + 1
    assert ready.free_slots == NUM_SLOTS


async def test_a_layout_that_does_not_fit_is_refused_with_the_number_to_set(rig: Rig) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="set --host-kv-memory to at least 999999") as error:
        await rig.attach(0, pipeline=999_999)
    assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    with pytest.raises(grpc.aio.AioRpcError, match="owner and layout must be set"):
        await rig.stub.Attach(pb.AttachRequest(owner="stage-0"))


async def test_two_processes_on_one_slab_see_the_same_bytes(rig: Rig) -> None:
    slab = await rig.attach(1)
    offset = slab.offset_bytes + 3 * SLOT_BYTES
    command = [sys.executable, "-c", WRITE_SLOT, slab.segment, str(offset), "kv of layer 3"]
    await asyncio.to_thread(subprocess.run, command, check=True)
    with attach(slab.segment) as memory:
        assert memory[offset : offset + 13] == b"kv of layer 3"


async def test_a_restarted_stage_finds_its_bytes(rig: Rig) -> None:
    slab = await rig.attach(0)
    with attach(slab.segment) as memory:
        memory[slab.offset_bytes : slab.offset_bytes + 2] = b"kv"
    again = await rig.attach(0)
    with attach(again.segment) as memory:
        assert memory[again.offset_bytes : again.offset_bytes + 2] == b"kv"


async def test_a_scheduler_that_never_reads_is_cut_off_not_buffered_for_ever(rig: Rig) -> None:
    from fastserve_kvstore.service import MAX_UNREAD_EVENTS, _Session

    session = _Session()
    session.tell(*[rig.store.ready] * MAX_UNREAD_EVENTS)
    session.tell(rig.store.ready)
    assert session.outbox.get_nowait() is None


async def test_status_describes_the_arena(rig: Rig) -> None:
    await rig.attach(0)
    await rig.attach(1)
    status = await rig.stub.GetStatus(pb.GetStatusRequest())
    assert status.segment == rig.arena.name
    assert (SHM_DIR / status.segment).exists()
    assert status.arena_bytes == NUM_SLOTS * 2 * SLOT_BYTES
    assert [slab.stage for slab in status.slabs] == [0, 1]
    assert not status.page_locked
