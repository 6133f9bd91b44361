"""Everything that knows where KV is, put together: pool, tiers, line, ranking, KV policy."""

from dataclasses import dataclass, replace

from fastserve_scheduler.core.appetite import Appetite
from fastserve_scheduler.core.blocks import BlockPool
from fastserve_scheduler.core.config import CoreConfig
from fastserve_scheduler.core.deadlines import DeadlineIndex
from fastserve_scheduler.core.enst import Enst
from fastserve_scheduler.core.history import History
from fastserve_scheduler.core.kv import KV_POLICIES, KvPolicy, Surroundings
from fastserve_scheduler.core.line import Line
from fastserve_scheduler.core.link import Link
from fastserve_scheduler.core.policies import Order
from fastserve_scheduler.core.profile import Profile
from fastserve_scheduler.core.ranking import EnstRanking, OrderRanking, Ranking
from fastserve_scheduler.core.tiers import Tiers
from fastserve_scheduler.core.wait_clock import WaitClock


@dataclass(frozen=True, slots=True)
class Memory:
    pool: BlockPool
    line: Line
    enst: Enst
    tiers: Tiers
    appetite: Appetite
    kv: KvPolicy

    @classmethod
    def of(cls, config: CoreConfig, profile: Profile, order: Order, clock: WaitClock, history: History) -> "Memory":
        line, enst, ranking = _ranked(config, order, clock)
        pool, link = BlockPool(config.block_size), Link(config.kv_block_bytes, profile.min_decode_ns)
        tiers, appetite = Tiers(pool, line, history, link, enst, config.num_stages), Appetite(config)
        kv = KV_POLICIES[config.kv_policy](Surroundings(config, line, tiers, ranking, appetite))
        return cls(pool, line, enst, tiers, appetite, kv)

    def rewired(self, config: CoreConfig, order: Order, clock: WaitClock) -> "Memory":
        """The same KV under another configuration and another order. The new line is empty."""
        line, enst, ranking = _ranked(config, order, clock)
        self.tiers.rewire(line, enst)
        self.appetite.reconfigure(config)
        kv = KV_POLICIES[config.kv_policy](Surroundings(config, line, self.tiers, ranking, self.appetite))
        return replace(self, line=line, enst=enst, kv=kv)


def _ranked(config: CoreConfig, order: Order, clock: WaitClock) -> tuple[Line, Enst, Ranking]:
    enst = Enst(config, order, clock)
    # Deadlines are kept for ENST alone; an order without levels has none and ranks by itself.
    deadlines = DeadlineIndex(clock) if config.kv_ranking == "enst" and enst.known else None
    line = Line(order, deadlines)
    return line, enst, OrderRanking(line) if deadlines is None else EnstRanking(enst, deadlines)
