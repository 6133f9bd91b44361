"""What Prometheus sees of the arena and its slots: right after every move, and right again when nothing happens."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from fastserve_kvstore.arena import Arena
from fastserve_kvstore.messages import Commit, Hello, Lease, Release, Revoke
from fastserve_kvstore.metrics import make_registry
from fastserve_kvstore.slabs import Layout
from fastserve_kvstore.store import HostStore

SLOT_BYTES, NUM_SLOTS, TTL_NS = 4096, 8, 100
ARENA_BYTES = 2 * SLOT_BYTES * NUM_SLOTS
LAYOUT = Layout("m", "float32", 0, 0, 2, 16, 1, 8, SLOT_BYTES)
PREFIX = "fastserve_kvstore_"


class Watched:
    """A store and what a scrape of it says, without the prefix."""

    def __init__(self, arena: Arena) -> None:
        self.store = HostStore(arena.kv_bytes, 1, TTL_NS)
        self.registry = make_registry(self.store, arena)

    def attach(self) -> None:
        """A pipeline of two stages."""
        for stage in range(2):
            layout = replace(LAYOUT, stage=stage)
            self.store.attach(f"stage-{stage}", layout, 2 * SLOT_BYTES)

    def seen(self) -> dict[str, float]:
        samples = [sample for family in self.registry.collect() for sample in family.samples]
        return {" ".join((s.name.removeprefix(PREFIX), *s.labels.values())): s.value for s in samples}

    def slots(self) -> tuple[float, float, float]:
        seen = self.seen()
        return seen["slots free"], seen["slots reserved"], seen["slots committed"]

    def events(self) -> list[float]:
        kinds = ("leased", "committed", "released", "revoked", "expired")
        return [self.seen()[f"slot_events_total {kind}"] for kind in kinds]


@pytest.fixture
def watched() -> Iterator[Watched]:
    arena = Arena.open(ARENA_BYTES)
    yield Watched(arena)
    arena.close()


def test_before_anybody_came_there_are_no_slots_and_the_arena_is_free(watched: Watched) -> None:
    seen = watched.seen()
    assert seen["arena_bytes false"] == ARENA_BYTES
    assert seen["slabs"] == seen["scheduler_connected"] == seen["attaches_total"] == 0
    assert watched.slots() == (0, 0, 0)
    assert seen["taken_bytes reserved"] == seen["taken_bytes committed"] == 0


def test_slots_and_bytes_follow_every_move_and_end_where_they_began(watched: Watched) -> None:
    watched.attach()
    store = watched.store
    assert watched.slots() == (8, 0, 0)
    store.apply(Lease(1, 5), 0)
    store.apply(Commit(1, 7, (0, 1)), 0)
    store.apply(Commit(1, 7, (0, 1)), 0)
    assert watched.slots() == (3, 3, 2)
    seen = watched.seen()
    assert (seen["taken_bytes reserved"], seen["taken_bytes committed"]) == (3 * 2 * SLOT_BYTES, 2 * 2 * SLOT_BYTES)
    store.apply(Revoke(1, (2,)), 0)
    store.expire(TTL_NS)
    store.apply(Release(7, (0, 1)), 0)
    assert watched.slots() == (8, 0, 0)
    assert watched.seen()["taken_bytes reserved"] == watched.seen()["taken_bytes committed"] == 0
    assert watched.events() == [5, 2, 2, 1, 2], "a commit that is said again counts once"
    assert watched.seen()["leases_expired_total"] == 1


def test_what_is_refused_is_counted_and_moves_nothing(watched: Watched) -> None:
    watched.attach()
    watched.store.apply(Lease(1, NUM_SLOTS + 1), 0)
    watched.store.apply(Release(1, (0,)), 0)
    watched.store.apply(Commit(1, 1, (0,)), 0)
    seen = watched.seen()
    assert (seen["refused_total full"], seen["refused_total invalid"]) == (1, 2)
    assert watched.events() == [0, 0, 0, 0, 0]
    assert watched.slots() == (8, 0, 0)


def test_who_is_there_is_told(watched: Watched) -> None:
    watched.attach()
    watched.attach()
    watched.store.hello(Hello("s", 1))
    seen = watched.seen()
    assert (seen["slabs"], seen["attaches_total"], seen["scheduler_connected"]) == (2, 4, 1)
    watched.store.apply(Lease(1, 3), 0)
    watched.store.goodbye()
    assert watched.seen()["scheduler_connected"] == 0
    assert watched.slots() == (5, 3, 0), "its slots are its own until another one comes"
    watched.store.hello(Hello("another", 2))
    assert watched.slots() == (8, 0, 0)


def test_a_layout_that_replaces_another_is_counted_and_frees_everything(watched: Watched) -> None:
    watched.attach()
    watched.store.apply(Lease(1, 3), 0)
    watched.store.attach("stage-0", LAYOUT, SLOT_BYTES)
    assert watched.seen()["layout_changes_total"] == 1
    assert watched.slots() == (16, 0, 0)
