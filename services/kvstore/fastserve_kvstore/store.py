"""The node's host KV: slabs, ledger and generation as one thing that answers commands. Pure, like its parts.

One scheduler at a time owns the slots. Another one knows nothing of what was stored, so at its hello everything is
free again; the same one coming back after a broken stream finds its slots as it left them.
"""

from enum import StrEnum
from typing import assert_never

from fastserve_kvstore.ledger import LedgerError, LedgerFullError, SlotLedger
from fastserve_kvstore.messages import (
    Command,
    Commit,
    Event,
    Hello,
    Lease,
    Leased,
    LeaseExpired,
    Ready,
    Refused,
    Release,
    Revoke,
)
from fastserve_kvstore.slabs import Layout, Slab, SlabMap

#: Layout changes that one start of the daemon can count before its generations would meet the next start's.
_RESETS_PER_START = 2**20


class SlotEvent(StrEnum):
    """What happens to a slot."""

    LEASED = "leased"
    COMMITTED = "committed"
    RELEASED = "released"
    REVOKED = "revoked"
    EXPIRED = "expired"


class SupersededError(Exception):
    """A scheduler with a newer epoch has taken over."""


class HostStore:
    """`start_number`: how many times the node's daemon has been started; generations rise with it."""

    def __init__(self, arena_bytes: int, start_number: int, lease_ttl_ns: int) -> None:
        self._slabs = SlabMap(arena_bytes)
        self._lease_ttl_ns = lease_ttl_ns
        self._scheduler_id = ""
        self._epoch = 0
        #: Whether the scheduler that the slots belong to is there.
        self.scheduler_connected = False
        self.generation = start_number * _RESETS_PER_START
        self.ledger = SlotLedger(0, lease_ttl_ns)
        #: Slots, counted since the daemon was started.
        self.slot_events = dict.fromkeys(SlotEvent, 0)
        self.attaches = 0
        self.leases_expired = 0
        self.refusals_full = 0
        self.refusals_invalid = 0
        self.layout_changes = 0

    @property
    def slabs(self) -> tuple[Slab, ...]:
        return self._slabs.slabs

    @property
    def slot_bytes(self) -> int:
        """One slot over all slabs; 0 while there are none."""
        return self._slabs.pipeline_slot_bytes

    @property
    def ready(self) -> Ready:
        ttl_ms = max(1, self._lease_ttl_ns // 1_000_000)
        return Ready(self.generation, self.ledger.num_slots, self.ledger.num_free, ttl_ms)

    def attach(self, owner: str, layout: Layout, pipeline_slot_bytes: int) -> tuple[Slab, bool]:
        """The owner's slab, and whether the scheduler has to be told. Raises SlabError."""
        known = len(self._slabs.slabs)
        slab, replaced = self._slabs.attach(owner, layout, pipeline_slot_bytes)
        self.attaches += 1
        if replaced:
            self.generation += 1
            self.layout_changes += 1
        if replaced or known == 0:
            self.ledger = SlotLedger(self._slabs.num_slots, self._lease_ttl_ns)
        return slab, replaced or known != len(self._slabs.slabs)

    def hello(self, hello: Hello) -> Ready:
        """A scheduler takes the slots, or comes back to them. Raises SupersededError for an epoch that is over."""
        same = hello.scheduler_id == self._scheduler_id
        if hello.epoch < self._epoch and not same:
            raise SupersededError(f"epoch {hello.epoch} is over: the slots belong to epoch {self._epoch}")
        if not same:
            self.ledger.clear()
        self._scheduler_id, self._epoch = hello.scheduler_id, max(hello.epoch, self._epoch)
        self.scheduler_connected = True
        return self.ready

    def goodbye(self) -> None:
        """The scheduler's stream has ended. Its slots stay its own until another one says hello."""
        self.scheduler_connected = False

    def apply(self, command: Command, now_ns: int) -> list[Event]:
        """What to tell the scheduler. A command that does not fit changes nothing and is refused."""
        try:
            return self._apply(command, now_ns)
        except LedgerError as error:
            if isinstance(error, LedgerFullError):
                self.refusals_full += 1
            else:
                self.refusals_invalid += 1
            lease_id = 0 if isinstance(command, Release) else command.lease_id
            return [Refused(lease_id, str(error))]

    def _apply(self, command: Command, now_ns: int) -> list[Event]:
        match command:
            case Lease(lease_id, num_slots):
                leased = self.ledger.lease(lease_id, num_slots, now_ns)
                self.slot_events[SlotEvent.LEASED] += len(leased)
                return [Leased(lease_id, leased)]
            case Commit(lease_id, job_id, slots):
                self.slot_events[SlotEvent.COMMITTED] += self.ledger.commit(lease_id, job_id, slots)
            case Release(job_id, slots):
                self.ledger.release(job_id, slots)
                self.slot_events[SlotEvent.RELEASED] += len(slots)
            case Revoke(lease_id, slots):
                self.ledger.revoke(lease_id, slots)
                self.slot_events[SlotEvent.REVOKED] += len(slots)
            case _:
                assert_never(command)
        return []

    def expire(self, now_ns: int) -> list[Event]:
        expired = self.ledger.expire(now_ns)
        self.leases_expired += len(expired)
        self.slot_events[SlotEvent.EXPIRED] += sum(len(lease.slots) for lease in expired)
        return [LeaseExpired(lease.lease_id, lease.slots) for lease in expired]
