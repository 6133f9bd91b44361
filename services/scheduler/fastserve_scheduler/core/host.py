"""The ledger of host slots: where the KV of jobs that gave up the device is kept.

A slot holds one block of every stage. Slots are leased ahead by the driver; the core alone says who uses which.
"""

from dataclasses import dataclass


class HostError(Exception):
    """The ledger was asked for something impossible: a defect of the caller, never load."""


@dataclass(slots=True)
class HostCopy:
    """The host copy of one job: slot i holds block i, positions 0 .. num_tokens-1 are valid.

    Blocks are only appended to, so the copy of a full block stays right for the job's life.
    """

    slots: tuple[int, ...] = ()
    num_tokens: int = 0


class HostSlots:
    """Granted slots, free or taken."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._taken: dict[int, bool] = {}

    @property
    def num_slots(self) -> int:
        return len(self._taken)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def grant(self, slots: tuple[int, ...]) -> None:
        """More slots. Raises ValueError, and takes none, when one of them is here already."""
        if len(dict.fromkeys(slots)) != len(slots) or any(slot in self._taken for slot in slots):
            raise ValueError(f"host slots granted twice: {slots}")
        self._taken.update(dict.fromkeys(slots, False))
        self._free.extend(reversed(slots))

    def take(self, count: int) -> tuple[int, ...]:
        """Raises HostError when the free slots do not suffice."""
        if count > len(self._free):
            raise HostError(f"{count} host slots asked, {len(self._free)} free")
        slots = tuple(self._free.pop() for _ in range(count))
        for slot in slots:
            self._taken[slot] = True
        return slots

    def give_back(self, slots: tuple[int, ...]) -> None:
        """Raises HostError on a slot that is not taken."""
        for slot in reversed(slots):
            if not self._taken.get(slot, False):
                raise HostError(f"host slot {slot} given back twice")
            self._taken[slot] = False
            self._free.append(slot)

    def void(self) -> None:
        """Nothing is granted any more."""
        self._free, self._taken = [], {}

    def free_slots(self) -> tuple[int, ...]:
        return tuple(self._free)

    def all_slots(self) -> tuple[int, ...]:
        return tuple(self._taken)
