"""Sizes as people write them: `512MiB`, `2GiB`, `64KiB`, or a bare number of bytes."""

import re
from typing import Annotated

from pydantic import BeforeValidator

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

_FACTORS = {
    "": 1,
    "b": 1,
    "k": KIB,
    "kib": KIB,
    "m": MIB,
    "mib": MIB,
    "g": GIB,
    "gib": GIB,
    "t": 1024 * GIB,
    "tib": 1024 * GIB,
}
_FACTORS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(text: str | int) -> int:
    """`"1.5GiB"` -> 1610612736. Raises ValueError with a sentence that says what is expected."""
    if isinstance(text, int):
        return text
    match = _SIZE.fullmatch(text)
    factor = _FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError("expected a size such as 512MiB, 2GiB or a number of bytes")
    return int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor


def format_bytes(num_bytes: int) -> str:
    """The shortest exact form where there is one (`1GiB`), else one decimal (`1.5GiB`)."""
    for factor, unit in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if num_bytes >= factor:
            whole, rest = divmod(num_bytes, factor)
            return f"{whole}{unit}" if rest == 0 else f"{num_bytes / factor:.1f}{unit}"
    return f"{num_bytes} bytes"


#: The type of a settings field that holds a number of bytes.
SizeBytes = Annotated[int, BeforeValidator(parse_bytes)]
