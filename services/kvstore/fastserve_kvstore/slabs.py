"""How the arena is divided. Pure: sizes in, offsets out.

All slabs of a pipeline have the same number of slots, so one slot number means the same job's block on every stage.
That number follows from the arena and the pipeline's bytes per slot alone, so it does not depend on who comes first.
"""

from dataclasses import dataclass, replace

#: Offsets are multiples of it: a slab can be registered with a device on its own.
PAGE_BYTES = 4096

#: Stages times ranks that may share one arena.
MAX_SLABS = 64

#: What aligning every slab may cost at most, on top of the memory that holds KV.
ALIGNMENT_SLACK_BYTES = MAX_SLABS * PAGE_BYTES


class SlabError(Exception):
    """The layout cannot be carried. The sentence goes to the caller."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What the bytes of a slot mean. Field for field the KvLayout of the wire."""

    model_fingerprint: str
    dtype: str
    stage: int
    rank: int
    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    slot_bytes: int

    def of_same_pipeline(self, other: "Layout") -> bool:
        """Stages differ in which and how many layers they hold, and in nothing else."""
        mine = replace(self, stage=0, rank=0, num_layers=0, slot_bytes=0)
        return mine == replace(other, stage=0, rank=0, num_layers=0, slot_bytes=0)


@dataclass(frozen=True, slots=True)
class Slab:
    owner: str
    layout: Layout
    offset_bytes: int
    num_slots: int

    @property
    def size_bytes(self) -> int:
        return self.num_slots * self.layout.slot_bytes


class SlabMap:
    """The slabs of one arena, in the order they were attached."""

    def __init__(self, arena_bytes: int) -> None:
        self.arena_bytes = arena_bytes
        self.num_slots = 0
        self._pipeline_slot_bytes = 0
        self._slabs: dict[str, Slab] = {}

    @property
    def slabs(self) -> tuple[Slab, ...]:
        return tuple(self._slabs.values())

    @property
    def pipeline_slot_bytes(self) -> int:
        """Bytes of one slot over all slabs; 0 before the first one."""
        return self._pipeline_slot_bytes

    def attach(self, owner: str, layout: Layout, pipeline_slot_bytes: int = 0) -> tuple[Slab, bool]:
        """The owner's slab, and whether it replaced what was there (then everything stored is lost).

        Raises SlabError, changing nothing, for a layout that does not fit.
        """
        pipeline_slot_bytes = pipeline_slot_bytes or layout.slot_bytes
        self._validate(layout, pipeline_slot_bytes)
        known = self._slabs.get(owner)
        if known is not None and known.layout == layout and pipeline_slot_bytes == self._pipeline_slot_bytes:
            return known, False
        if not self._slabs or known is not None or not self._joins(layout, pipeline_slot_bytes):
            return self._start_over(owner, layout, pipeline_slot_bytes)
        return self._place(owner, layout), False

    def _validate(self, layout: Layout, pipeline_slot_bytes: int) -> None:
        if layout.slot_bytes <= 0 or pipeline_slot_bytes < layout.slot_bytes:
            raise SlabError(
                f"slot_bytes must be positive and at most pipeline_slot_bytes "
                f"(got {layout.slot_bytes} and {pipeline_slot_bytes})"
            )
        if pipeline_slot_bytes > self.arena_bytes:
            raise SlabError(
                f"one block of this model takes {pipeline_slot_bytes} bytes and the host arena has "
                f"{self.arena_bytes}; set --host-kv-memory to at least {pipeline_slot_bytes}"
            )

    def _joins(self, layout: Layout, pipeline_slot_bytes: int) -> bool:
        first = next(iter(self._slabs.values()))
        return layout.of_same_pipeline(first.layout) and pipeline_slot_bytes == self._pipeline_slot_bytes

    def _start_over(self, owner: str, layout: Layout, pipeline_slot_bytes: int) -> tuple[Slab, bool]:
        replaced = bool(self._slabs)
        self._slabs.clear()
        self._pipeline_slot_bytes = pipeline_slot_bytes
        self.num_slots = self.arena_bytes // pipeline_slot_bytes
        return self._place(owner, layout), replaced

    def _place(self, owner: str, layout: Layout) -> Slab:
        last = next(reversed(self._slabs.values()), None)
        offset_bytes = _aligned(last.offset_bytes + last.size_bytes) if last else 0
        slab = Slab(owner, layout, offset_bytes, self.num_slots)
        if slab.offset_bytes + slab.size_bytes > self.arena_bytes + ALIGNMENT_SLACK_BYTES:
            taken = ", ".join(self._slabs)
            raise SlabError(f"the arena is divided among {taken}; {owner} was not counted in pipeline_slot_bytes")
        if len(self._slabs) >= MAX_SLABS:
            raise SlabError(f"{MAX_SLABS} slabs are attached, which is the limit")
        self._slabs[owner] = slab
        return slab


def _aligned(offset_bytes: int) -> int:
    return -(-offset_bytes // PAGE_BYTES) * PAGE_BYTES
