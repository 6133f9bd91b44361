from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve_common.packed import pack_u32, unpack_u32


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_round_trip(values: list[int]) -> None:
    packed = pack_u32(values)
    assert len(packed) == 4 * len(values)
    assert unpack_u32(packed) == array("I", values)


def test_the_bytes_are_little_endian_whatever_the_machine() -> None:
    assert pack_u32([1, 0x01020304]) == bytes([1, 0, 0, 0, 4, 3, 2, 1])


@pytest.mark.parametrize("value", [-1, 2**32])
def test_what_does_not_fit_is_refused(value: int) -> None:
    with pytest.raises(OverflowError):
        pack_u32([value])


def test_half_a_value_is_refused() -> None:
    with pytest.raises(ValueError, match="bytes"):
        unpack_u32(b"\0" * 6)
