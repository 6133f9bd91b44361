"""The table of policies. A new one is a file here and a row below."""

from fastserve_scheduler.core.policies.batch_fcfs import BatchFcfs
from fastserve_scheduler.core.policies.edf import Edf
from fastserve_scheduler.core.policies.fcfs import Fcfs
from fastserve_scheduler.core.policies.fixed_priority import FixedPriority
from fastserve_scheduler.core.policies.las import Las
from fastserve_scheduler.core.policies.naive_mlfq import NaiveMlfq
from fastserve_scheduler.core.policies.order import Order
from fastserve_scheduler.core.policies.plas import Plas
from fastserve_scheduler.core.policies.predicted import Predicted
from fastserve_scheduler.core.policies.round_robin import RoundRobin
from fastserve_scheduler.core.policies.sjf import Sjf
from fastserve_scheduler.core.policies.skip_join_mlfq import SkipJoinMlfq
from fastserve_scheduler.core.policies.slack import Slack
from fastserve_scheduler.core.policies.srpt import Srpt

POLICIES: dict[str, type[Order]] = {
    "skip-join-mlfq": SkipJoinMlfq,
    "fcfs": Fcfs,
    "batch-fcfs": BatchFcfs,
    "round-robin": RoundRobin,
    "fixed-priority": FixedPriority,
    "naive-mlfq": NaiveMlfq,
    "srpt": Srpt,
    "slack": Slack,
    "las": Las,
    "sjf": Sjf,
    "edf": Edf,
    "plas": Plas,
    "predicted": Predicted,
}

__all__ = ["POLICIES", "Order"]
