"""The store as schedulers and stages see it, in whatever order they come and crash: nothing is pinned for ever."""

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fastserve_kvstore.messages import Commit, Event, Hello, Lease, Leased, LeaseExpired, Refused, Release, Revoke
from fastserve_kvstore.slabs import Layout
from fastserve_kvstore.store import HostStore, SlotEvent

TTL_NS = 100
SLOT_BYTES, NUM_STAGES, NUM_SLOTS = 100, 2, 6
LAYOUT = Layout("m", "float32", 0, 0, 2, 16, 1, 8, SLOT_BYTES)


class StoreMachine(RuleBasedStateMachine):
    """Elsewhere pins never came back, or counts went below zero, until the pool was of no use (LMCache #1034, #987).

    The scheduler here remembers what it was told, and is at times another one that remembers nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.store = HostStore(NUM_SLOTS * NUM_STAGES * SLOT_BYTES, 1, TTL_NS)
        self.now_ns = 0
        self.scheduler = 0
        self.model = LAYOUT.model_fingerprint
        self.generation = self.store.generation
        self.leased: set[int] = set()
        self.stored: dict[int, int] = {}

    @initialize()
    def stages_attach(self) -> None:
        for stage in range(NUM_STAGES):
            self.store.attach(f"stage-{stage}", replace(LAYOUT, stage=stage), NUM_STAGES * SLOT_BYTES)
        self.scheduler_comes()

    def attach(self, stage: int) -> None:
        layout = replace(LAYOUT, stage=stage, model_fingerprint=self.model)
        self.store.attach(f"stage-{stage}", layout, NUM_STAGES * SLOT_BYTES)

    @rule()
    def scheduler_comes(self) -> None:
        """Another one: the one before it has crashed, or lost its lead."""
        self.scheduler += 1
        ready = self.store.hello(Hello(f"s-{self.scheduler}", self.scheduler))
        self.forget()
        assert ready.free_slots == ready.total_slots == NUM_SLOTS

    @rule()
    def stream_breaks_and_comes_back(self) -> None:
        self.store.goodbye()
        assert not self.store.scheduler_connected
        ready = self.store.hello(Hello(f"s-{self.scheduler}", self.scheduler))
        assert ready.free_slots == NUM_SLOTS - len(self.leased) - len(self.stored)

    @rule(stage=st.integers(0, NUM_STAGES - 1))
    def a_stage_is_started_again(self, stage: int) -> None:
        """It finds what it left."""
        self.attach(stage)

    @rule(fingerprint=st.sampled_from(["m", "another"]))
    def the_model_is_replaced(self, fingerprint: str) -> None:
        """All stages change together; the first one that does ends the generation."""
        self.model = fingerprint
        for stage in range(NUM_STAGES):
            self.attach(stage)
        if self.store.generation != self.generation:
            assert self.store.generation > self.generation
            self.generation = self.store.generation
            self.forget()

    @rule(num_slots=st.integers(0, NUM_SLOTS + 1))
    def lease(self, num_slots: int) -> None:
        for event in self.apply(Lease(1, num_slots)):
            if isinstance(event, Leased):
                assert not set(event.slots) & (self.leased | set(self.stored)), "a slot for two"
                self.leased |= set(event.slots)

    @precondition(lambda self: self.leased)
    @rule(job_id=st.integers(1, 3), data=st.data())
    def keep(self, job_id: int, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.sampled_from(sorted(self.leased)), unique=True, min_size=1))
        assert self.apply(Commit(1, job_id, tuple(slots))) == []
        self.leased -= set(slots)
        self.stored.update(dict.fromkeys(slots, job_id))

    @precondition(lambda self: self.leased)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.sampled_from(sorted(self.leased)), unique=True, min_size=1))
        assert self.apply(Revoke(1, tuple(slots))) == []
        self.leased -= set(slots)

    @rule(job_id=st.integers(1, 3))
    def job_ends(self, job_id: int) -> None:
        slots = tuple(slot for slot, owner in self.stored.items() if owner == job_id)
        assert self.apply(Release(job_id, slots)) == []
        self.stored = {slot: owner for slot, owner in self.stored.items() if owner != job_id}

    @rule(job_id=st.integers(1, 3), slot=st.integers(0, NUM_SLOTS))
    def a_late_or_wrong_release(self, job_id: int, slot: int) -> None:
        """Refused, unless it is right."""
        events = self.apply(Release(job_id, (slot,)))
        if self.stored.get(slot) == job_id:
            assert events == []
            del self.stored[slot]
        else:
            (refused,) = events
            assert isinstance(refused, Refused)

    @rule(elapsed_ns=st.sampled_from([1, TTL_NS]))
    def time_passes(self, elapsed_ns: int) -> None:
        self.now_ns += elapsed_ns
        for event in self.store.expire(self.now_ns):
            assert isinstance(event, LeaseExpired)
            assert set(event.slots) == self.leased
            self.leased.clear()

    def apply(self, command: Lease | Commit | Release | Revoke) -> list[Event]:
        return self.store.apply(command, self.now_ns)

    def forget(self) -> None:
        self.leased.clear()
        self.stored.clear()

    @invariant()
    def counts_agree(self) -> None:
        ledger = self.store.ledger
        ledger.check()
        if self.store.slabs:
            assert (ledger.num_reserved, ledger.num_committed) == (len(self.leased), len(self.stored))
            assert ledger.num_free == NUM_SLOTS - len(self.leased) - len(self.stored)
        events = self.store.slot_events
        assert events[SlotEvent.COMMITTED] >= events[SlotEvent.RELEASED]
        assert events[SlotEvent.LEASED] >= sum(events[e] for e in (SlotEvent.COMMITTED, SlotEvent.REVOKED))

    def teardown(self) -> None:
        """Whatever happened: when its jobs have ended and its leases run out, everything is free."""
        for job_id in set(self.stored.values()):
            self.job_ends(job_id)
        self.store.expire(self.now_ns + TTL_NS)
        assert self.store.ledger.num_free == self.store.ledger.num_slots


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
