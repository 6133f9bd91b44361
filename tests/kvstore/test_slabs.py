"""Dividing the arena: same number of slots everywhere, no overlap, whoever comes first."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve_kvstore.slabs import ALIGNMENT_SLACK_BYTES, MAX_SLABS, PAGE_BYTES, Layout, SlabError, SlabMap

LAYOUT = Layout("smollm2", "float32", 0, 0, 15, 16, 3, 64, slot_bytes=1000)


def stage(number: int, slot_bytes: int = 1000) -> Layout:
    return replace(LAYOUT, stage=number, num_layers=slot_bytes // 10, slot_bytes=slot_bytes)


@given(
    slot_bytes=st.lists(st.integers(1, 5000), min_size=1, max_size=6),
    arena_bytes=st.integers(30_000, 10_000_000),
    data=st.data(),
)
def test_slabs_of_a_pipeline_never_overlap_and_have_the_same_number_of_slots(
    slot_bytes: list[int], arena_bytes: int, data: st.DataObject
) -> None:
    slabs = SlabMap(arena_bytes)
    for number in data.draw(st.permutations(range(len(slot_bytes)))):
        slabs.attach(f"stage-{number}", stage(number, slot_bytes[number]), sum(slot_bytes))
    assert {slab.num_slots for slab in slabs.slabs} == {arena_bytes // sum(slot_bytes)}
    end = 0
    for slab in sorted(slabs.slabs, key=lambda slab: slab.offset_bytes):
        assert slab.offset_bytes >= end
        assert slab.offset_bytes % PAGE_BYTES == 0
        end = slab.offset_bytes + slab.size_bytes
    assert end <= arena_bytes + ALIGNMENT_SLACK_BYTES


def test_the_same_layout_gets_the_same_slab() -> None:
    slabs = SlabMap(100_000)
    first, replaced = slabs.attach("stage-0", stage(0), 2000)
    assert (first.num_slots, replaced) == (50, False)
    assert slabs.attach("stage-1", stage(1), 2000)[1] is False
    assert slabs.attach("stage-0", stage(0), 2000) == (first, False)


@pytest.mark.parametrize(
    "changed",
    [
        replace(stage(0), model_fingerprint="other"),
        replace(stage(0), dtype="bfloat16"),
        replace(stage(0), block_size=32),
        replace(stage(0), slot_bytes=500),
    ],
)
def test_another_layout_under_the_same_owner_replaces_everything(changed: Layout) -> None:
    slabs = SlabMap(100_000)
    slabs.attach("stage-0", stage(0), 2000)
    slabs.attach("stage-1", stage(1), 2000)
    slab, replaced = slabs.attach("stage-0", changed, 2000)
    assert replaced
    assert slabs.slabs == (slab,)


def test_a_stage_of_another_pipeline_replaces_everything() -> None:
    slabs = SlabMap(100_000)
    slabs.attach("stage-0", stage(0), 2000)
    assert slabs.attach("stage-1", replace(stage(1), model_fingerprint="other"), 2000)[1]
    assert slabs.attach("stage-2", replace(stage(2), model_fingerprint="other"), 4000)[1], "other bytes per slot"


def test_what_cannot_be_carried_is_refused_with_the_number_to_set() -> None:
    slabs = SlabMap(100_000)
    with pytest.raises(SlabError, match="set --host-kv-memory to at least 100001"):
        slabs.attach("stage-0", stage(0), 100_001)
    with pytest.raises(SlabError, match="slot_bytes must be positive"):
        slabs.attach("stage-0", replace(LAYOUT, slot_bytes=0), 0)
    with pytest.raises(SlabError, match="at most pipeline_slot_bytes"):
        slabs.attach("stage-0", stage(0), 999)
    assert slabs.slabs == ()


def test_the_ranks_of_a_stage_have_one_slot_number_and_memory_of_their_own() -> None:
    """Two stages of two ranks each: an order that names slots is the same order to all four."""
    slabs = SlabMap(100_000)
    for number in range(2):
        for rank in range(2):
            layout = replace(stage(number, 500), rank=rank, num_kv_heads=2)
            _, replaced = slabs.attach(f"stage-{number}-rank-{rank}", layout, 4 * 500)
            assert not replaced
    assert {slab.num_slots for slab in slabs.slabs} == {50}
    assert len({slab.offset_bytes for slab in slabs.slabs}) == 4
    assert [(slab.layout.stage, slab.layout.rank) for slab in slabs.slabs] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    again, replaced = slabs.attach("stage-1-rank-0", replace(stage(1, 500), rank=1, num_kv_heads=2), 4 * 500)
    assert replaced, "another rank under the same name: what was stored is somebody else's heads"
    assert slabs.slabs == (again,)


def test_a_stage_that_was_not_counted_is_refused_and_harms_nobody() -> None:
    slabs = SlabMap(100_000_000)
    slabs.attach("stage-0", stage(0), 1000)
    before = slabs.slabs
    with pytest.raises(SlabError, match="divided among stage-0; stage-1 was not counted"):
        slabs.attach("stage-1", stage(1), 1000)
    assert slabs.slabs == before


def test_the_number_of_slabs_has_a_limit() -> None:
    slabs = SlabMap(10**9)
    for number in range(MAX_SLABS):
        slabs.attach(f"stage-{number}", stage(number), 10**6)
    with pytest.raises(SlabError, match="limit"):
        slabs.attach("one-more", stage(MAX_SLABS), 10**6)
