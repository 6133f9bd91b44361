"""One pipeline with everything that drives it. Its jobs are its own; who gets which request is decided elsewhere."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastserve_common.state import StateStore
from fastserve_scheduler import codec
from fastserve_scheduler.desk import Desk
from fastserve_scheduler.driver import Driver
from fastserve_scheduler.hold import Hold
from fastserve_scheduler.inbox import Inbox
from fastserve_scheduler.inputs import Drain, Input
from fastserve_scheduler.kv_link import KvLink
from fastserve_scheduler.messages import Hello, Status
from fastserve_scheduler.metrics import Metrics
from fastserve_scheduler.pipeline import Pipeline
from fastserve_scheduler.profiler import Profiler, ProfileStore
from fastserve_scheduler.settings import SchedulerSettings


@dataclass(slots=True)
class Replica:
    """`index`: which of the scheduler's pipelines it is, from 0."""

    index: int
    driver: Driver
    pipeline: Pipeline
    kv_link: KvLink
    desk: Desk
    inbox: Inbox[Input]
    metrics: Metrics

    @classmethod
    def build(
        cls,
        index: int,
        settings: SchedulerSettings,
        store: StateStore,
        scheduler_id: str,
        generation: int,
        on_status: Callable[[Status], None],
    ) -> "Replica":
        inbox: Inbox[Input] = Inbox()
        metrics = Metrics(settings.num_stages, settings.group)
        pipeline = Pipeline(
            store, settings.num_stages, generation, inbox, time.monotonic, replica=index, group=settings.group
        )
        kv_link = KvLink(store, scheduler_id if index == 0 else f"{scheduler_id}-{index}", generation, inbox)
        hello = Hello(generation, settings.max_model_len, settings.max_model_len, settings.policy, settings.num_stages)
        desk = Desk(hello, Hold(settings.max_num_queued_reqs, settings.max_num_queued_tokens, metrics.refused))
        profiler = Profiler(ProfileStore(settings.profile_dir), pipeline.send_measure, settings.max_num_seqs)
        own = settings.model_copy(update={"journal": _journal(settings.journal, index)})
        driver = Driver(own, inbox, pipeline, kv_link, profiler, desk, metrics, on_status)
        driver.sessions.number(index, settings.num_replicas)
        return cls(index, driver, pipeline, kv_link, desk, inbox, metrics)

    def tasks(self) -> list[tuple[str, Coroutine[Any, Any, None]]]:
        """What must run while this process leads, each with a name."""
        return [
            (f"driver-{self.index}", self.driver.run()),
            (f"pipeline-{self.index}", self.pipeline.run()),
            (f"kvstore-link-{self.index}", self.kv_link.run()),
        ]

    def state(self) -> codec.ClusterState:
        runner = self.driver.runner
        stage_ns = {} if runner is None else runner.stage_ns
        stages = tuple((v.stage, v.up, v.address, stage_ns.get(v.stage, 0)) for v in self.pipeline.views())
        return codec.ClusterState(self.driver.settings.policy, self.driver.snapshot(), stages)

    async def drain(self) -> None:
        """Refuse new requests and let the others finish. Those that do not in time lose what a crash would cost them:
        their gateways submit them to the next scheduler, with the tokens they have."""
        self.inbox.put_now(Drain())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.driver.drained.wait(), self.driver.settings.drain_timeout)


def _journal(path: Path | None, index: int) -> Path | None:
    """Every replica has a core, and so a journal, of its own."""
    return path if path is None or index == 0 else path.with_name(f"{path.name}.replica-{index}")
