"""The ledger: every slot has one owner at all times, whatever the order of calls, crashes and late answers."""

from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fastserve_kvstore.ledger import MAX_LEASES, Expired, LedgerError, LedgerFullError, SlotLedger

TTL_NS = 100


def test_the_life_of_a_slot() -> None:
    ledger = SlotLedger(4, TTL_NS)
    assert ledger.lease(1, 3, now_ns=0) == (0, 1, 2)
    ledger.commit(1, job_id=7, slots=[0, 2])
    ledger.revoke(1, [1])
    assert (ledger.num_free, ledger.num_reserved, ledger.num_committed) == (2, 0, 2)
    ledger.release(7, [0, 2])
    assert ledger.num_free == 4
    ledger.check()


def test_a_crash_between_reserve_and_commit_gives_the_slots_back_and_a_late_commit_is_refused() -> None:
    ledger = SlotLedger(4, TTL_NS)
    slots = ledger.lease(1, 2, now_ns=0)
    assert ledger.next_expiry_ns == TTL_NS
    assert ledger.expire(TTL_NS - 1) == []
    assert ledger.expire(TTL_NS) == [Expired(1, slots)]
    assert ledger.num_free == 4
    with pytest.raises(LedgerError, match="slot 0 is not reserved under lease 1: it is free"):
        ledger.commit(1, 7, slots)
    ledger.check()


def test_a_slot_leased_again_is_not_the_first_ones_to_commit() -> None:
    ledger = SlotLedger(1, TTL_NS)
    slots = ledger.lease(1, 1, now_ns=0)
    ledger.expire(TTL_NS)
    assert ledger.lease(2, 1, now_ns=TTL_NS) == slots
    with pytest.raises(LedgerError, match="reserved under lease 2"):
        ledger.commit(1, 7, slots)
    ledger.commit(2, 8, slots)
    ledger.check()


def test_renewal_keeps_a_lease_and_adds_to_it() -> None:
    ledger = SlotLedger(4, TTL_NS)
    ledger.lease(1, 1, now_ns=0)
    ledger.lease(2, 1, now_ns=1)
    assert ledger.lease(1, 0, now_ns=50) == ()
    assert ledger.lease(1, 2, now_ns=60) == (2, 3)
    assert [expired.lease_id for expired in ledger.expire(TTL_NS + 1)] == [2]
    assert ledger.expire(TTL_NS + 60) == [Expired(1, (0, 2, 3))]
    with pytest.raises(LedgerError, match="lease 1 is not open"):
        ledger.lease(1, 0, now_ns=200)


def test_saying_a_commit_again_changes_nothing() -> None:
    ledger = SlotLedger(2, TTL_NS)
    slots = ledger.lease(1, 2, now_ns=0)
    ledger.commit(1, 7, slots[:1])
    ledger.commit(1, 7, slots)
    ledger.commit(1, 7, slots)
    assert ledger.num_committed == 2
    with pytest.raises(LedgerError, match="committed to job 7"):
        ledger.commit(1, 8, slots)
    ledger.check()


@pytest.mark.parametrize("slots", [[0, 3], [0, 0], [0, 9], [0, 2]])
def test_all_or_nothing(slots: list[int]) -> None:
    """Slot 2 is committed to another job, 3 is free, 9 does not exist, and naming one twice is an error."""
    ledger = SlotLedger(4, TTL_NS)
    reserved = ledger.lease(1, 3, now_ns=0)
    ledger.commit(1, 5, reserved[2:])
    for call in (
        partial(ledger.commit, 1, 7, slots),
        partial(ledger.revoke, 1, slots),
        partial(ledger.release, 7, slots),
    ):
        with pytest.raises(LedgerError):
            call()
        ledger.check()
        assert (ledger.num_free, ledger.num_reserved, ledger.num_committed) == (1, 2, 1)


def test_too_much_is_refused_and_takes_nothing() -> None:
    ledger = SlotLedger(3, TTL_NS)
    ledger.lease(1, 2, now_ns=0)
    with pytest.raises(LedgerFullError, match="2 slots asked for, 1 of 3 are free"):
        ledger.lease(2, 2, now_ns=0)
    assert ledger.num_free == 1
    ledger.check()


def test_leases_have_a_limit() -> None:
    ledger = SlotLedger(MAX_LEASES + 1, TTL_NS)
    for lease_id in range(MAX_LEASES):
        ledger.lease(lease_id, 1, now_ns=0)
    with pytest.raises(LedgerFullError, match=str(MAX_LEASES)):
        ledger.lease(MAX_LEASES, 1, now_ns=0)


@pytest.mark.parametrize(("num_slots", "ttl_ns"), [(-1, 1), (1, 0)])
def test_nonsense_sizes_are_refused(num_slots: int, ttl_ns: int) -> None:
    with pytest.raises(ValueError, match="must"):
        SlotLedger(num_slots, ttl_ns)


class LedgerMachine(RuleBasedStateMachine):
    """Recipe: random lease/commit/revoke/release/expire/crash against a model that is a plain dict."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ns = 0
        self.owner: dict[int, tuple[str, int]] = {}
        self.deadline: dict[int, int] = {}

    @initialize(num_slots=st.integers(1, 4))
    def start(self, num_slots: int) -> None:
        self.ledger = SlotLedger(num_slots, TTL_NS)
        self.num_slots = num_slots

    def of(self, kind: str, number: int) -> list[int]:
        return sorted(slot for slot, owner in self.owner.items() if owner == (kind, number))

    @rule(lease_id=st.integers(0, 2), count=st.integers(0, 3))
    def lease(self, lease_id: int, count: int) -> None:
        is_open = lease_id in self.deadline
        free = self.num_slots - len(self.owner)
        if (count == 0 and not is_open) or count > free:
            with pytest.raises(LedgerError):
                self.ledger.lease(lease_id, count, self.now_ns)
            return
        slots = self.ledger.lease(lease_id, count, self.now_ns)
        assert len(slots) == count
        assert not set(slots) & set(self.owner), "a slot with an owner was handed out"
        self.owner.update(dict.fromkeys(slots, ("lease", lease_id)))
        self.deadline[lease_id] = self.now_ns + TTL_NS

    @rule(lease_id=st.integers(0, 2), job_id=st.integers(0, 1), slots=st.lists(st.integers(0, 4), max_size=3))
    def commit(self, lease_id: int, job_id: int, slots: list[int]) -> None:
        allowed = (("lease", lease_id), ("job", job_id))
        fits = len(set(slots)) == len(slots) and all(self.owner.get(slot) in allowed for slot in slots)
        if not fits:
            fresh = [slot for slot in slots if self.owner.get(slot) != ("job", job_id)]
            if fresh == slots or len(set(fresh)) != len(fresh) or any(self.owner.get(s) != allowed[0] for s in fresh):
                with pytest.raises(LedgerError):
                    self.ledger.commit(lease_id, job_id, slots)
                return
        self.ledger.commit(lease_id, job_id, slots)
        self.owner.update(dict.fromkeys(slots, ("job", job_id)))
        self.close_if_empty(lease_id)

    @rule(lease_id=st.integers(0, 2), slots=st.lists(st.integers(0, 4), max_size=3))
    def revoke(self, lease_id: int, slots: list[int]) -> None:
        if len(set(slots)) != len(slots) or any(self.owner.get(slot) != ("lease", lease_id) for slot in slots):
            with pytest.raises(LedgerError):
                self.ledger.revoke(lease_id, slots)
            return
        self.ledger.revoke(lease_id, slots)
        self.forget(slots)
        self.close_if_empty(lease_id)

    @rule(job_id=st.integers(0, 1), slots=st.lists(st.integers(0, 4), max_size=3))
    def release(self, job_id: int, slots: list[int]) -> None:
        if len(set(slots)) != len(slots) or any(self.owner.get(slot) != ("job", job_id) for slot in slots):
            with pytest.raises(LedgerError):
                self.ledger.release(job_id, slots)
            return
        self.ledger.release(job_id, slots)
        self.forget(slots)

    @rule(job_id=st.integers(0, 1))
    def finish(self, job_id: int) -> None:
        slots = self.of("job", job_id)
        self.ledger.release(job_id, slots)
        self.forget(slots)

    @rule(elapsed_ns=st.sampled_from([1, TTL_NS // 2, TTL_NS]))
    def time_passes(self, elapsed_ns: int) -> None:
        self.now_ns += elapsed_ns
        due = {lease_id for lease_id, deadline in self.deadline.items() if deadline <= self.now_ns}
        expired = self.ledger.expire(self.now_ns)
        assert {lease.lease_id: sorted(lease.slots) for lease in expired} == {i: self.of("lease", i) for i in due}
        for lease_id in due:
            self.forget(self.of("lease", lease_id))
            del self.deadline[lease_id]

    @precondition(lambda self: self.owner)
    @rule()
    def the_scheduler_crashes(self) -> None:
        self.ledger.clear()
        self.owner.clear()
        self.deadline.clear()

    def forget(self, slots: list[int]) -> None:
        for slot in slots:
            del self.owner[slot]

    def close_if_empty(self, lease_id: int) -> None:
        if lease_id in self.deadline and not self.of("lease", lease_id):
            del self.deadline[lease_id]

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "ledger"):
            return
        self.ledger.check()
        kinds = [kind for kind, _ in self.owner.values()]
        assert self.ledger.num_reserved == kinds.count("lease")
        assert self.ledger.num_committed == kinds.count("job")
        assert self.ledger.num_free == self.num_slots - len(self.owner)
        assert self.ledger.next_expiry_ns == min(self.deadline.values(), default=None)

    def teardown(self) -> None:
        """Empty at the end: whatever happened, jobs that end and leases that run out give everything back."""
        if not hasattr(self, "ledger"):
            return
        for job_id in (0, 1):
            self.ledger.release(job_id, self.of("job", job_id))
        self.ledger.expire(self.now_ns + TTL_NS)
        assert self.ledger.num_free == self.num_slots
        self.ledger.check()


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
