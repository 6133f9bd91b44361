"""The scheduler's own account of its host slots at a kvstore: which commands the core's decisions become.

Pure. Every slot is leased once and then stays the scheduler's, reserved or committed: a slot that is released is
leased again with the next commit, so that freeing costs one message, not two.
"""

from collections.abc import Sequence

from fastserve_scheduler.kv_messages import CommitSlots, KvCommand, LeaseSlots, ReleaseSlots

#: All slots are under one lease: it is renewed in one message.
LEASE_ID = 1
#: Slots of one lease command: their numbers come back in one message.
LEASE_CHUNK_SLOTS = 8192


class SlotBookError(Exception):
    """The kvstore leased something that is not there."""


class SlotBook:
    """`num_slots`: all that there are. Nobody else leases at this kvstore."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._granted: set[int] = set()
        self._job_of: dict[int, int] = {}
        #: Released, and not leased again yet.
        self._free: set[int] = set()

    @property
    def num_committed(self) -> int:
        return len(self._job_of)

    @property
    def num_reserved(self) -> int:
        """What the lease holds, as soon as all commands have been heard."""
        return len(self._granted) - len(self._job_of) - len(self._free)

    def open(self) -> list[KvCommand]:
        """Ask for every slot."""
        sizes = [LEASE_CHUNK_SLOTS] * (self.num_slots // LEASE_CHUNK_SLOTS)
        if rest := self.num_slots % LEASE_CHUNK_SLOTS:
            sizes.append(rest)
        return [LeaseSlots(LEASE_ID, size) for size in sizes]

    def leased(self, slots: Sequence[int]) -> tuple[int, ...]:
        """The slots among them that were not the scheduler's before. Raises SlotBookError."""
        fresh = tuple([slot for slot in slots if slot not in self._granted])
        if not all(0 <= slot < self.num_slots for slot in fresh):
            raise SlotBookError(f"it leased a slot that is not one of {self.num_slots}")
        self._granted.update(fresh)
        return fresh

    def keep(self, job_id: int, slots: Sequence[int]) -> list[KvCommand]:
        """They hold the job's KV now."""
        commands: list[KvCommand] = []
        if self._free:
            commands.append(LeaseSlots(LEASE_ID, len(self._free)))
            self._free.clear()
        self._job_of.update(dict.fromkeys(slots, job_id))
        return [*commands, CommitSlots(LEASE_ID, job_id, tuple(slots))]

    def free(self, job_id: int, slots: Sequence[int]) -> list[KvCommand]:
        """The job does not need them any more. Those that were never committed are reserved, and stay so."""
        committed = tuple([slot for slot in slots if self._job_of.get(slot) == job_id])
        for slot in committed:
            del self._job_of[slot]
        self._free.update(committed)
        return [ReleaseSlots(job_id, committed)] if committed else []

    def renew(self) -> list[KvCommand]:
        """A lease that holds nothing is not open, and need not be."""
        return [LeaseSlots(LEASE_ID, 0)] if self.num_reserved else []
