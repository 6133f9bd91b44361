"""Range checks that name the field as the caller spelled it."""

import math
from collections.abc import Mapping, Sequence

from fastserve_common.errors import InvalidArgumentError


class Checks:
    """`names`: how an API spells a field, where it differs from `RequestFields`."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def refuse(self, name: str, problem: str) -> InvalidArgumentError:
        shown = self._names.get(name, name)
        return InvalidArgumentError(f"{shown} {problem}", param=shown)

    def integer(self, name: str, value: int | None, default: int, low: int, high: int) -> int:
        if value is None:
            return default
        if not low <= value <= high:
            raise self.refuse(name, f"must be between {low} and {high}")
        return value

    def real(
        self, name: str, value: float | None, default: float, low: float, high: float, *, above: bool = False
    ) -> float:
        """`above`: the lower bound itself is not allowed."""
        if value is None:
            return default
        if not math.isfinite(value) or not low <= value <= high or (above and value == low):
            raise self.refuse(
                name, f"must be {f'above {low:g} and at most' if above else f'between {low:g} and'} {high:g}"
            )
        return float(value)

    def at_most(self, name: str, values: Sequence[object] | Mapping[int, float], most: int) -> None:
        if len(values) > most:
            raise self.refuse(name, f"has {len(values)} entries; the limit is {most}")
