"""What the scheduler says and hears on its Control stream, free of the wire's types. `codec.py` translates."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hello:
    scheduler_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Lease:
    lease_id: int
    num_slots: int


@dataclass(frozen=True, slots=True)
class Commit:
    lease_id: int
    job_id: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Release:
    job_id: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Revoke:
    lease_id: int
    slots: tuple[int, ...]


Command = Lease | Commit | Release | Revoke


@dataclass(frozen=True, slots=True)
class Ready:
    generation: int
    total_slots: int
    free_slots: int
    lease_ttl_ms: int


@dataclass(frozen=True, slots=True)
class Leased:
    lease_id: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LeaseExpired:
    lease_id: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    lease_id: int
    message: str


Event = Ready | Leased | LeaseExpired | Refused
