"""Wire <-> messages: the only file of this service that names generated types field by field."""

from typing import assert_never

from fastserve.v1 import kvstore_pb2 as pb
from fastserve_common.errors import InvalidArgumentError
from fastserve_common.packed import pack_u32, unpack_u32
from fastserve_kvstore.messages import (
    Command,
    Commit,
    Event,
    Hello,
    Lease,
    Leased,
    LeaseExpired,
    Ready,
    Refused,
    Release,
    Revoke,
)
from fastserve_kvstore.slabs import Layout


def decode_command(message: pb.KvCommand) -> Hello | Command | None:
    """None: a kind of command that this version does not know. Raises InvalidArgumentError for broken bytes."""
    match message.WhichOneof("command"):
        case "hello":
            return Hello(message.hello.scheduler_id, message.hello.epoch)
        case "lease":
            return Lease(message.lease.lease_id, message.lease.num_slots)
        case "commit":
            commit = message.commit
            return Commit(commit.lease_id, commit.job_id, _slots(commit.host_slots))
        case "release":
            return Release(message.release.job_id, _slots(message.release.host_slots))
        case "revoke":
            return Revoke(message.revoke.lease_id, _slots(message.revoke.host_slots))
        case _:
            return None


def encode_event(event: Event) -> pb.KvEvent:
    match event:
        case Ready(generation, total_slots, free_slots, lease_ttl_ms):
            ready = pb.KvReady(generation=generation, total_slots=total_slots, free_slots=free_slots)
            ready.lease_ttl_ms = lease_ttl_ms
            return pb.KvEvent(ready=ready)
        case Leased(lease_id, slots):
            return pb.KvEvent(leased=pb.SlotsLeased(lease_id=lease_id, host_slots=pack_u32(slots)))
        case LeaseExpired(lease_id, slots):
            return pb.KvEvent(expired=pb.SlotsExpired(lease_id=lease_id, host_slots=pack_u32(slots)))
        case Refused(lease_id, message):
            return pb.KvEvent(refused=pb.KvRefused(lease_id=lease_id, message=message))
        case _:
            assert_never(event)


def decode_layout(layout: pb.KvLayout) -> Layout:
    return Layout(
        model_fingerprint=layout.model_fingerprint,
        dtype=layout.dtype,
        stage=layout.stage,
        rank=layout.rank,
        num_layers=layout.num_layers,
        block_size=layout.block_size,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        slot_bytes=layout.slot_bytes,
    )


def encode_layout(layout: Layout) -> pb.KvLayout:
    return pb.KvLayout(
        model_fingerprint=layout.model_fingerprint,
        dtype=layout.dtype,
        stage=layout.stage,
        rank=layout.rank,
        num_layers=layout.num_layers,
        block_size=layout.block_size,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        slot_bytes=layout.slot_bytes,
    )


def _slots(packed: bytes) -> tuple[int, ...]:
    try:
        return tuple(unpack_u32(packed))
    except ValueError as error:
        raise InvalidArgumentError(f"host_slots: {error}", param="host_slots") from error
