"""What the link between device and host carries, per direction, in blocks: measured, and spent with measure.

A block is the same share of every stage, and a swap is as slow as its slowest stage; so time per block is the one
number that bandwidth comes down to.
"""

from dataclasses import dataclass, field

from fastserve_scheduler.core.commands import SwapDirection

ITERATIONS_AHEAD = 4
"""Iterations whose time the copies under way in one direction may fill. Fewer leave gaps between a copy's end and the
next plan; more only make a decision older before it takes effect."""

POOL_SHARE = 4
"""No more than a quarter of the pool is under way in one direction: blocks that move run nothing."""

PROMOTION_SHARE = 2
"""Promotions may use half of the time of one direction."""

MAX_CREDIT_NS = 500_000_000
"""Time that promotions may save up while nobody needs it."""

ASSUMED_BYTES_PER_SECOND = 4_000_000_000
"""Before the first measurement: less than any link in use carries, so that the start is not a flood."""

WEIGHT = 8
"""One observation moves a mean by 1/8 of the way."""


def moved(mean: int, seen: int) -> int:
    """The mean after one more observation; the first one is the mean."""
    return seen if mean == 0 else mean + (seen - mean) // WEIGHT


@dataclass(slots=True)
class Link:
    """`iteration_ns`, `ns_per_block`: moving means, 0 while unknown."""

    kv_block_bytes: int
    iteration_ns: int
    ns_per_block: dict[SwapDirection, int] = field(default_factory=lambda: dict.fromkeys(SwapDirection, 0))
    _credit_ns: int = MAX_CREDIT_NS
    _credit_at_ns: int = 0

    def observe_iteration(self, compute_ns: int) -> None:
        self.iteration_ns = max(1, moved(self.iteration_ns, compute_ns))

    def observe_copy(self, direction: SwapDirection, num_blocks: int, copy_ns: int) -> None:
        """A copy of `num_blocks` blocks took the slowest stage `copy_ns`."""
        if num_blocks > 0 and copy_ns > 0:
            seen = max(1, copy_ns // num_blocks)
            self.ns_per_block[direction] = max(1, moved(self.ns_per_block[direction], seen))

    def block_ns(self, direction: SwapDirection) -> int:
        """Expected time of one block; 0: nothing is known about the link."""
        measured = self.ns_per_block[direction]
        return measured or self.kv_block_bytes * 1_000_000_000 // ASSUMED_BYTES_PER_SECOND

    def may_send(self, direction: SwapDirection, num_blocks: int, under_way: int, pool_blocks: int) -> bool:
        """Whether `num_blocks` more may start, with `under_way` blocks on their way. One swap alone always may."""
        return under_way == 0 or under_way + num_blocks <= self._most(direction, pool_blocks)

    def _most(self, direction: SwapDirection, pool_blocks: int) -> int:
        block_ns = self.block_ns(direction)
        carried = ITERATIONS_AHEAD * self.iteration_ns // block_ns if block_ns else 0
        return min(carried, pool_blocks // POOL_SHARE)

    def afford_promotion(self, num_blocks: int, now_ns: int) -> bool:
        """Pay for bringing in `num_blocks` because of a promotion; False: the link's share for that is spent."""
        self._credit_ns += (now_ns - self._credit_at_ns) // PROMOTION_SHARE
        self._credit_ns, self._credit_at_ns = min(self._credit_ns, MAX_CREDIT_NS), now_ns
        # A job larger than all that can be saved up may come when everything is saved up.
        cost_ns = num_blocks * self.block_ns(SwapDirection.IN)
        if self._credit_ns < min(cost_ns, MAX_CREDIT_NS):
            return False
        self._credit_ns -= cost_ns
        return True
