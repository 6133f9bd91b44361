"""What the scheduler says to a node's kvstore and hears from it, free of wire types."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostArena:
    """Where a stage's host slots are: the node of the kvstore, its generation, the slots. All zero: it has none."""

    generation: int = 0
    num_slots: int = 0
    node: str = ""


NO_HOST = HostArena()


# --- scheduler -> kvstore


@dataclass(frozen=True, slots=True)
class KvHello:
    """`scheduler_id`: another one than the last finds every slot free."""

    scheduler_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class LeaseSlots:
    """More slots under `lease_id`, which is renewed; 0: renewed only."""

    lease_id: int
    num_slots: int


@dataclass(frozen=True, slots=True)
class CommitSlots:
    lease_id: int
    job_id: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReleaseSlots:
    job_id: int
    slots: tuple[int, ...]


KvCommand = KvHello | LeaseSlots | CommitSlots | ReleaseSlots


# --- kvstore -> scheduler


@dataclass(frozen=True, slots=True)
class KvReady:
    """`lease_ttl_ms` 0: not said."""

    generation: int
    total_slots: int
    lease_ttl_ms: int


@dataclass(frozen=True, slots=True)
class SlotsLeased:
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SlotsExpired:
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KvRefused:
    message: str


@dataclass(frozen=True, slots=True)
class UnknownEvent:
    """Of a newer kvstore: tolerated, not acted on."""


KvEvent = KvReady | SlotsLeased | SlotsExpired | KvRefused | UnknownEvent
