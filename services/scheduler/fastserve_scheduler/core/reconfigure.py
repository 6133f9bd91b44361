"""Another configuration under a running core: jobs keep their KV, their tokens and as much of their place as they can.

The same policy: levels, accounts and clocks stay, and what is counted from now on is counted by the new numbers.
Another policy: all jobs join it anew, one behind the other as they stood in the old order; tickets are void, and who
held one waits from now on. Plans in flight land as they were sent, so a lowered cap is felt by the next one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastserve_scheduler.core.config import CoreConfig
from fastserve_scheduler.core.history import Happening
from fastserve_scheduler.core.job import Job

if TYPE_CHECKING:
    from fastserve_scheduler.core.scheduler import SchedulerCore

FIXED = ("num_stages", "block_size", "max_model_len", "service_classes", "kv_policy", "kv_ranking", "kv_block_bytes")
"""What stages were started with, what KV was laid out by, and who has been admitted under which name."""


def check_change(before: CoreConfig, after: CoreConfig) -> None:
    """Raises ValueError when something differs that cannot change under running jobs."""
    for name in FIXED:
        if getattr(before, name) != getattr(after, name):
            raise ValueError(f"{name} cannot be changed while jobs run: it is {getattr(before, name)!r}")


def reconfigure(core: SchedulerCore, config: CoreConfig) -> None:
    """Raises ValueError, and changes nothing, for a change that cannot be made under running jobs."""
    check_change(core.config, config)
    waiting = core.line.jobs()
    for job in waiting:
        core.line.take(job)
    another_policy = config.policy != core.config.policy
    core.config = config
    core.clock.set_alpha(config.mlfq.alpha_ns)
    if another_policy:
        core.order = core.make_order()
        core.order.now_ns = core.now_ns
        core.rescue.rewire(core.order)
        _requeue(core)
    else:
        core.order.reconfigure(config)
    core.wire(core.memory.rewired(config, core.order, core.clock))
    for job in waiting:
        core.line.put(job)


def _requeue(core: SchedulerCore) -> None:
    """All jobs join the core's new order. None is in line; those in flight join too, and run on."""
    for job in sorted(core.jobs.values(), key=_old_place):
        had_ticket, job.ticket = job.ticket, False
        job.level = job.joined_level = job.used_ns = 0
        core.order.join(job)
        job.rank = core.order.rank(job)
        if had_ticket and core.clock.waits(job):
            core.clock.restart(job, core.now_ns)
        core.record(job, Happening.REQUEUED, job.level)


def _old_place(job: Job) -> tuple[tuple[int, ...], int]:
    return job.rank, job.job_id
