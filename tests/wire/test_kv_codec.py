"""The scheduler's side of the kvstore's Control stream, against the generated types."""

from array import array

import pytest

from fastserve.v1 import kvstore_pb2 as pb
from fastserve_common.packed import pack_u32
from fastserve_scheduler.kv_codec import kv_command_to_wire, kv_event_from_wire
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

SLOTS = (3, 0, 2**32 - 1)
PACKED = array("I", SLOTS).tobytes()


@pytest.mark.parametrize(
    ("command", "wire"),
    [
        (KvHello("me/1", 7), pb.KvCommand(hello=pb.KvHello(scheduler_id="me/1", epoch=7))),
        (LeaseSlots(1, 9), pb.KvCommand(lease=pb.LeaseSlots(lease_id=1, num_slots=9))),
        (CommitSlots(1, 5, SLOTS), pb.KvCommand(commit=pb.CommitSlots(lease_id=1, job_id=5, host_slots=PACKED))),
        (ReleaseSlots(5, SLOTS), pb.KvCommand(release=pb.ReleaseSlots(job_id=5, host_slots=PACKED))),
    ],
)
def test_commands(command: KvCommand, wire: pb.KvCommand) -> None:
    assert pb.KvCommand.FromString(kv_command_to_wire(command)) == wire


@pytest.mark.parametrize(
    ("wire", "event"),
    [
        (pb.KvEvent(ready=pb.KvReady(generation=1, total_slots=2, free_slots=2, lease_ttl_ms=3)), KvReady(1, 2, 3)),
        (pb.KvEvent(leased=pb.SlotsLeased(lease_id=1, host_slots=pack_u32(SLOTS))), SlotsLeased(SLOTS)),
        (pb.KvEvent(expired=pb.SlotsExpired(lease_id=1, host_slots=pack_u32(SLOTS))), SlotsExpired(SLOTS)),
        (pb.KvEvent(refused=pb.KvRefused(message="no")), KvRefused("no")),
        (pb.KvEvent(), UnknownEvent()),
    ],
)
def test_events(wire: pb.KvEvent, event: KvEvent) -> None:
    assert kv_event_from_wire(wire.SerializeToString()) == event


@pytest.mark.parametrize("data", [b"\xff", b"\x12\x03\x12\x01a"])
def test_bytes_that_are_no_event_are_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"not a|whole number|multiple"):
        kv_event_from_wire(data)
