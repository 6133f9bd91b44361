"""The scheduler's account of its host slots agrees with the kvstore's ledger, whatever the core decides."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastserve_kvstore.ledger import SlotLedger
from fastserve_scheduler import slot_book
from fastserve_scheduler.kv_messages import CommitSlots, KvCommand, LeaseSlots, ReleaseSlots
from fastserve_scheduler.slot_book import SlotBook, SlotBookError

NUM_SLOTS = 6


def _obey(ledger: SlotLedger, book: SlotBook, commands: Sequence[KvCommand]) -> list[int]:
    """What the kvstore does with the commands; the slots that are new to the book. Raises LedgerError."""
    granted: list[int] = []
    for command in commands:
        match command:
            case LeaseSlots(lease_id, num_slots):
                granted += book.leased(ledger.lease(lease_id, num_slots, 0))
            case CommitSlots(lease_id, job_id, slots):
                ledger.commit(lease_id, job_id, slots)
            case ReleaseSlots(job_id, slots):
                ledger.release(job_id, slots)
            case _:
                raise AssertionError(command)
    ledger.check()
    return granted


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("kfr"), st.integers(0, 2), st.sets(st.integers(0, NUM_SLOTS - 1)))))
def test_the_ledger_never_refuses(steps: list[tuple[str, int, set[int]]]) -> None:
    """k: a job keeps slots that no other job has; f: it frees some, kept or never kept; r: the lease is renewed."""
    ledger, book = SlotLedger(NUM_SLOTS, 1), SlotBook(NUM_SLOTS)
    assert sorted(_obey(ledger, book, book.open())) == list(range(NUM_SLOTS))
    owner: dict[int, int] = {}
    for kind, job_id, wished in steps:
        slots = sorted(slot for slot in wished if owner.get(slot, job_id) == job_id)
        if kind == "k" and slots:
            assert _obey(ledger, book, book.keep(job_id, slots)) == []
            owner.update(dict.fromkeys(slots, job_id))
        elif kind == "f":
            assert _obey(ledger, book, book.free(job_id, slots)) == []
            for slot in slots:
                owner.pop(slot, None)
        elif kind == "r":
            assert _obey(ledger, book, book.renew()) == []
        assert ledger.num_committed == book.num_committed == len(owner)
        assert ledger.num_reserved == book.num_reserved
    assert (
        _obey(ledger, book, [c for job in range(3) for c in book.free(job, [s for s in owner if owner[s] == job])])
        == []
    )
    assert ledger.num_committed == 0


def test_all_slots_are_asked_for_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_book, "LEASE_CHUNK_SLOTS", 4)
    assert [c.num_slots for c in SlotBook(10).open() if isinstance(c, LeaseSlots)] == [4, 4, 2]
    assert len(SlotBook(8).open()) == 2
    assert SlotBook(0).open() == []


def test_freeing_costs_one_message() -> None:
    book = SlotBook(4)
    book.leased(range(4))
    book.keep(1, (0, 1))
    assert book.free(1, (0, 1)) == [ReleaseSlots(1, (0, 1))]
    assert book.free(1, (0, 1)) == []
    assert book.keep(2, (1,)) == [LeaseSlots(slot_book.LEASE_ID, 2), CommitSlots(slot_book.LEASE_ID, 2, (1,))]


def test_a_slot_that_is_not_there_is_an_error() -> None:
    with pytest.raises(SlotBookError, match="not one of 4"):
        SlotBook(4).leased((4,))
