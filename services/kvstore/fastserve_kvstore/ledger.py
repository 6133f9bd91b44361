"""Who owns each host slot: nobody, a lease, or a job. Pure: time is an argument, nothing here does I/O.

    free --lease--> reserved --commit--> committed --release--> free
                    reserved --revoke--> free
                    reserved --expire--> free

A slot is in exactly one of the three states, and a call either does all it says or raises and changes nothing.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

#: Leases that may be open at once. A scheduler needs a handful; more is a leak of its own.
MAX_LEASES = 4096


class LedgerError(Exception):
    """The call does not fit the ledger's state. The sentence goes to the caller."""


class LedgerFullError(LedgerError):
    """Not enough free slots, or too many leases; the same call may succeed later."""


@dataclass(frozen=True, slots=True)
class Expired:
    lease_id: int
    slots: tuple[int, ...]


@dataclass(slots=True)
class _Lease:
    deadline_ns: int
    slots: dict[int, None] = field(default_factory=dict)  # a set that keeps its order


class SlotLedger:
    """Slots 0 .. num_slots - 1. Calls must not pass a `now_ns` lower than an earlier one."""

    def __init__(self, num_slots: int, lease_ttl_ns: int) -> None:
        if num_slots < 0 or lease_ttl_ns <= 0:
            raise ValueError("num_slots must not be negative and lease_ttl_ns must be positive")
        self.num_slots = num_slots
        self._lease_ttl_ns = lease_ttl_ns
        # First freed, first handed out: a late write of a copy that was given up has the most time to land.
        self._free = deque(range(num_slots))
        # The time to live is one for all and a renewal moves a lease to the end: this order is deadline order.
        self._leases: dict[int, _Lease] = {}
        self._lease_of: dict[int, int] = {}
        self._job_of: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_reserved(self) -> int:
        return len(self._lease_of)

    @property
    def num_committed(self) -> int:
        return len(self._job_of)

    @property
    def next_expiry_ns(self) -> int | None:
        """When the oldest lease ends, if there is one."""
        return next((lease.deadline_ns for lease in self._leases.values()), None)

    def lease(self, lease_id: int, num_slots: int, now_ns: int) -> tuple[int, ...]:
        """Reserve slots under `lease_id`, new or open; renews it. Returns the slots added, in hand-out order.

        Raises LedgerFullError when fewer are free, and LedgerError for an empty new lease.
        """
        lease = self._leases.get(lease_id)
        if lease is None and num_slots == 0:
            raise LedgerError(f"lease {lease_id} is not open: it has expired or all of it was used")
        if lease is None and len(self._leases) >= MAX_LEASES:
            raise LedgerFullError(f"{MAX_LEASES} leases are open, which is the limit")
        if num_slots > len(self._free):
            raise LedgerFullError(f"{num_slots} slots asked for, {len(self._free)} of {self.num_slots} are free")
        added = tuple(self._free.popleft() for _ in range(num_slots))
        renewed = self._leases.pop(lease_id, None) or _Lease(0)
        renewed.deadline_ns = now_ns + self._lease_ttl_ns
        renewed.slots.update(dict.fromkeys(added))
        self._leases[lease_id] = renewed
        self._lease_of.update(dict.fromkeys(added, lease_id))
        return added

    def commit(self, lease_id: int, job_id: int, slots: Sequence[int]) -> int:
        """These reserved slots now hold the job's KV. Slots already committed to the same job stay so; says how many
        were not.

        Raises LedgerError when any slot is neither.
        """
        fresh = [slot for slot in slots if self._job_of.get(slot) != job_id]
        self._require_reserved(lease_id, fresh)
        self._unreserve(lease_id, fresh)
        self._job_of.update(dict.fromkeys(fresh, job_id))
        return len(fresh)

    def revoke(self, lease_id: int, slots: Sequence[int]) -> None:
        """These reserved slots will not be written: free again. Raises LedgerError when any is not reserved."""
        self._require_reserved(lease_id, slots)
        self._unreserve(lease_id, slots)
        self._free.extend(slots)

    def release(self, job_id: int, slots: Sequence[int]) -> None:
        """The job's KV in these slots is no longer needed. Raises LedgerError when any is not the job's."""
        _require_distinct(slots)
        for slot in slots:
            if self._job_of.get(slot) != job_id:
                raise LedgerError(f"slot {slot} is not committed to job {job_id}: it is {self._describe(slot)}")
        for slot in slots:
            del self._job_of[slot]
        self._free.extend(slots)

    def expire(self, now_ns: int) -> list[Expired]:
        """Free every slot whose lease has run out; says which, oldest lease first."""
        due = [lease_id for lease_id, lease in self._leases.items() if lease.deadline_ns <= now_ns]
        return [self._end(lease_id) for lease_id in due]

    def clear(self) -> None:
        """Every slot is free: whoever owned them is gone."""
        self._leases.clear()
        freed = sorted([*self._lease_of, *self._job_of])
        self._lease_of.clear()
        self._job_of.clear()
        self._free.extend(freed)

    def check(self) -> None:
        """Raises AssertionError unless every slot is in exactly one state and the leases agree."""
        owned = [*self._free, *self._lease_of, *self._job_of]
        assert sorted(owned) == list(range(self.num_slots)), "a slot is lost or owned twice"
        leased = {slot: lease_id for lease_id, lease in self._leases.items() for slot in lease.slots}
        assert leased == self._lease_of, "the leases and their slots disagree"
        assert all(lease.slots for lease in self._leases.values()), "an empty lease is kept"
        deadlines = [lease.deadline_ns for lease in self._leases.values()]
        assert deadlines == sorted(deadlines), "leases are not in deadline order"

    def _require_reserved(self, lease_id: int, slots: Sequence[int]) -> None:
        _require_distinct(slots)
        for slot in slots:
            if self._lease_of.get(slot) != lease_id:
                raise LedgerError(f"slot {slot} is not reserved under lease {lease_id}: it is {self._describe(slot)}")

    def _describe(self, slot: int) -> str:
        if slot in self._lease_of:
            return f"reserved under lease {self._lease_of[slot]}"
        if slot in self._job_of:
            return f"committed to job {self._job_of[slot]}"
        return "free" if 0 <= slot < self.num_slots else f"not one of the {self.num_slots} slots"

    def _unreserve(self, lease_id: int, slots: Sequence[int]) -> None:
        for slot in slots:
            del self._lease_of[slot]
            del self._leases[lease_id].slots[slot]
        if lease_id in self._leases and not self._leases[lease_id].slots:
            del self._leases[lease_id]

    def _end(self, lease_id: int) -> Expired:
        slots = tuple(self._leases[lease_id].slots)
        self._unreserve(lease_id, slots)
        self._free.extend(slots)
        return Expired(lease_id, slots)


def _require_distinct(slots: Sequence[int]) -> None:
    if len(set(slots)) != len(slots):
        raise LedgerError("a slot is named twice")
