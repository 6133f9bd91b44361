"""The wire keeps its promises: no field number is reused, renamed in kind, or dropped without being reserved.

`descriptors.json` is what has been promised. New fields are added to it by
`FASTSERVE_UPDATE_DESCRIPTORS=1 pytest tests/wire`; a change or a loss of an old one fails in any case.
"""

import json
import os
from pathlib import Path

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FileDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto

from fastserve.v1 import admin_pb2, inference_pb2, kvstore_pb2, sampling_pb2, scheduler_pb2, stage_pb2

PROMISED = Path(__file__).with_name("descriptors.json")
FILES = (admin_pb2, inference_pb2, kvstore_pb2, sampling_pb2, scheduler_pb2, stage_pb2)

#: full name of message, enum or service -> number (or method) -> what it is
Shape = dict[str, dict[str, str]]


def _message(descriptor: Descriptor, shape: Shape) -> None:
    shape[descriptor.full_name] = {str(field.number): f"{field.name}: {_kind(field)}" for field in descriptor.fields}
    for nested in descriptor.nested_types:
        _message(nested, shape)
    for enum in descriptor.enum_types:
        _enum(enum, shape)


def _kind(field: object) -> str:
    kind = getattr(field, "message_type", None) or getattr(field, "enum_type", None)
    name = kind.full_name if kind is not None else str(getattr(field, "type", ""))
    return f"repeated {name}" if getattr(field, "is_repeated", False) else name


def _enum(descriptor: EnumDescriptor, shape: Shape) -> None:
    shape[descriptor.full_name] = {str(value.number): value.name for value in descriptor.values}


def _file(descriptor: FileDescriptor, shape: Shape) -> None:
    for message in descriptor.message_types_by_name.values():
        _message(message, shape)
    for enum in descriptor.enum_types_by_name.values():
        _enum(enum, shape)
    for service in descriptor.services_by_name.values():
        shape[service.full_name] = {
            method.name: f"{method.input_type.full_name} -> {method.output_type.full_name}"
            for method in service.methods
        }


def present_shape() -> Shape:
    shape: Shape = {}
    for file in FILES:
        _file(file.DESCRIPTOR, shape)
    return shape


def _reserved() -> dict[str, set[str]]:
    """Numbers that were given up on purpose."""
    found: dict[str, set[str]] = {}

    def walk(proto: DescriptorProto, prefix: str) -> None:
        name = f"{prefix}.{proto.name}"
        found[name] = {str(n) for span in proto.reserved_range for n in range(span.start, span.end)}
        for nested in proto.nested_type:
            walk(nested, name)

    for file in FILES:
        proto = FileDescriptorProto()
        file.DESCRIPTOR.CopyToProto(proto)
        for message in proto.message_type:
            walk(message, proto.package)
    return found


def broken_promises(promised: Shape, present: Shape, reserved: dict[str, set[str]]) -> list[str]:
    broken = []
    for name, fields in promised.items():
        if name not in present:
            broken.append(f"{name} is gone")
            continue
        for number, what in fields.items():
            now = present[name].get(number)
            if now is None and number not in reserved.get(name, set()):
                broken.append(f"{name} {number} ({what}) is gone and not reserved")
            elif now is not None and now != what:
                broken.append(f"{name} {number} was {what}, is {now}")
    return broken


def test_no_promise_is_broken() -> None:
    promised = json.loads(PROMISED.read_text())
    assert broken_promises(promised, present_shape(), _reserved()) == []


def test_what_is_new_is_promised_from_now_on() -> None:
    present = present_shape()
    if os.environ.get("FASTSERVE_UPDATE_DESCRIPTORS"):
        PROMISED.write_text(json.dumps(present, indent=1, sort_keys=True) + "\n")
    promised = json.loads(PROMISED.read_text())
    new = {
        f"{name} {number}"
        for name, fields in present.items()
        for number in fields
        if number not in promised.get(name, {})
    }
    assert new == set(), "add them: FASTSERVE_UPDATE_DESCRIPTORS=1 pytest tests/wire"


def test_broken_promises_are_seen() -> None:
    old: Shape = {"a.M": {"1": "x: 9", "2": "y: 9", "3": "z: 9"}, "a.Gone": {}}
    now: Shape = {"a.M": {"1": "x: 9", "2": "other: 9"}}
    assert broken_promises(old, now, {"a.M": set()}) == [
        "a.M 2 was y: 9, is other: 9",
        "a.M 3 (z: 9) is gone and not reserved",
        "a.Gone is gone",
    ]
    assert len(broken_promises(old, now, {"a.M": {"3"}})) == 2
