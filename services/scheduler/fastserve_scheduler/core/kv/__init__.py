"""The table of KV policies. A new one is a file here and a row below."""

from fastserve_scheduler.core.kv.blocking import Blocking
from fastserve_scheduler.core.kv.defer import Defer
from fastserve_scheduler.core.kv.policy import KvPolicy, Surroundings
from fastserve_scheduler.core.kv.proactive import Proactive
from fastserve_scheduler.core.kv.reactive import Reactive
from fastserve_scheduler.core.kv.recompute import Recompute

KV_POLICIES: dict[str, type[KvPolicy]] = {
    "proactive": Proactive,
    "reactive": Reactive,
    "blocking": Blocking,
    "recompute": Recompute,
    "defer": Defer,
}

__all__ = ["KV_POLICIES", "KvPolicy", "Surroundings"]
