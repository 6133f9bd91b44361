"""Activations cut into chunks and put together again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve_worker import codec
from fastserve_worker.assembly import ActivationAssembly
from fastserve_worker.errors import PlanError
from fastserve_worker.fake_stage import FakeStage
from fastserve_worker.messages import ActivationPart, Activations, Plan, PlanRow

INFO = FakeStage(stage=1, num_stages=2).info


def plan_of(num_tokens: int) -> Plan:
    rows = (PlanRow(1, 0, num_tokens, b"", b"", None),) if num_tokens else ()
    return Plan(7, 2, rows)


@given(st.binary(max_size=80), st.integers(1, 30))
def test_any_tensor_survives_any_chunk_size(data: bytes, chunk_bytes: int) -> None:
    data = data[: len(data) // 8 * 8]
    shape = (len(data) // 8, INFO.hidden_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "ACTIVATION_CHUNK_BYTES", chunk_bytes)
        messages = list(codec.forward_activations(7, 2, Activations("uint32", shape, data, 99)))
    assembly = ActivationAssembly(plan_of(shape[0]), INFO)
    *early, last = [assembly.add(codec.decode_part(message.activations)) for message in messages]
    assert early == [None] * len(early)
    assert last == Activations("uint32", shape, bytearray(data), 99) or (last is not None and not data)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (ActivationPart(8, 2, "uint32", (2, 2), 0, bytes(16), 0), "while those of plan 7 were due"),
        (ActivationPart(7, 2, "float32", (2, 2), 0, bytes(16), 0), "activations are float32"),
        (ActivationPart(7, 2, "uint32", (3, 2), 0, bytes(16), 0), r"this stage expects uint32 \(2, 2\)"),
        (ActivationPart(7, 2, "uint32", (2, 2), 8, bytes(8), 0), "bytes 8 to 16 of 16 came after 0 bytes"),
        (ActivationPart(7, 2, "uint32", (2, 2), 0, bytes(24), 0), "bytes 0 to 24 of 16"),
        (ActivationPart(7, 2, "uint32", (2, 2), 0, b"", 0), "bytes 0 to 0 of 16"),
    ],
)
def test_what_does_not_fit_the_plan_is_refused(part: ActivationPart, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        ActivationAssembly(plan_of(2), INFO).add(part)
