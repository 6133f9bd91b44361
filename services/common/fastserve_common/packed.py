"""Token ids, block ids and host slots on the wire: little-endian uint32, packed.

Building a `repeated uint32` field from a list costs about ten times as much as copying an array.
"""

import sys
from array import array
from collections.abc import Iterable


def pack_u32(values: Iterable[int]) -> bytes:
    """Raises OverflowError when a value is not within 0 .. 2**32 - 1."""
    packed = array("I", values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_u32(data: bytes) -> "array[int]":
    """Raises ValueError when `data` is not a whole number of uint32."""
    values = array("I")
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values
