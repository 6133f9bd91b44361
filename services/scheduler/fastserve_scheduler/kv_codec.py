"""Wire <-> messages of the kvstore's Control stream: gRPC serializers, as in `codec.py`."""

from google.protobuf.message import DecodeError

from fastserve.v1 import kvstore_pb2
from fastserve_common.packed import pack_u32, unpack_u32
from fastserve_scheduler.kv_messages import (
    CommitSlots,
    KvCommand,
    KvEvent,
    KvHello,
    KvReady,
    KvRefused,
    LeaseSlots,
    ReleaseSlots,
    SlotsExpired,
    SlotsLeased,
    UnknownEvent,
)

KV_CONTROL_METHOD = f"/{kvstore_pb2.DESCRIPTOR.services_by_name['KvStore'].full_name}/Control"


def kv_command_to_wire(command: KvCommand) -> bytes:
    pb = kvstore_pb2.KvCommand()
    match command:
        case KvHello(scheduler_id, epoch):
            pb.hello.scheduler_id, pb.hello.epoch = scheduler_id, epoch
        case LeaseSlots(lease_id, num_slots):
            pb.lease.lease_id, pb.lease.num_slots = lease_id, num_slots
        case CommitSlots(lease_id, job_id, slots):
            pb.commit.lease_id, pb.commit.job_id, pb.commit.host_slots = lease_id, job_id, pack_u32(slots)
        case ReleaseSlots(job_id, slots):
            pb.release.job_id, pb.release.host_slots = job_id, pack_u32(slots)
    return pb.SerializeToString()


def kv_event_from_wire(data: bytes) -> KvEvent:
    """Raises ValueError for bytes that are no event."""
    try:
        pb = kvstore_pb2.KvEvent.FromString(data)
    except DecodeError as error:
        raise ValueError(f"not a KvEvent: {error}") from error
    match pb.WhichOneof("event"):
        case "ready":
            return KvReady(pb.ready.generation, pb.ready.total_slots, pb.ready.lease_ttl_ms)
        case "leased":
            return SlotsLeased(tuple(unpack_u32(pb.leased.host_slots)))
        case "expired":
            return SlotsExpired(tuple(unpack_u32(pb.expired.host_slots)))
        case "refused":
            return KvRefused(pb.refused.message)
        case _:
            return UnknownEvent()
