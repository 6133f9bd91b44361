"""All pipelines of a scheduler as one: started, asked, told and ended together."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

from fastserve_common.state import StateStore
from fastserve_scheduler import codec
from fastserve_scheduler.front import Front
from fastserve_scheduler.gateway_link import Peer
from fastserve_scheduler.inbox import Inbox
from fastserve_scheduler.inputs import Input
from fastserve_scheduler.messages import Load, Status
from fastserve_scheduler.replica import Replica
from fastserve_scheduler.runner import Runner
from fastserve_scheduler.sessions import Session
from fastserve_scheduler.settings import SchedulerSettings

#: How often gateways hear what there is to do.
LOAD_PERIOD_S = 0.25


@dataclass(slots=True)
class Fleet:
    """`front` is None for a single pipeline: gateways talk to its driver directly."""

    replicas: tuple[Replica, ...]
    front: Front | None

    @classmethod
    def build(
        cls,
        settings: SchedulerSettings,
        store: StateStore,
        scheduler_id: str,
        generation: int,
        on_status: Callable[[Status], None],
    ) -> "Fleet":
        single = settings.num_replicas == 1
        replicas = tuple(
            Replica.build(index, settings, store, scheduler_id, generation, on_status if single else lambda _: None)
            for index in range(settings.num_replicas)
        )
        return cls(replicas, None if single else Front(replicas, settings.replica_patience, on_status))

    @property
    def inbox(self) -> Inbox[Input]:
        """For what gateways and operators say."""
        return self.replicas[0].inbox if self.front is None else self.front.inbox

    def tasks(self) -> list[tuple[str, Coroutine[Any, Any, None]]]:
        """What must run while this process leads, each with a name."""
        work = [task for replica in self.replicas for task in replica.tasks()]
        return work if self.front is None else [*work, ("front", self.front.run())]

    def state(self) -> codec.FleetState:
        return codec.FleetState(tuple(replica.state() for replica in self.replicas))

    @property
    def links(self) -> tuple[Peer, ...]:
        """The streams of gateways."""
        return self.replicas[0].desk.links if self.front is None else self.front.links

    def load(self) -> Load:
        """What there is to do, over all replicas that do it."""
        drivers = [replica.driver for replica in self.replicas]
        runners = [driver.runner for driver in drivers if driver.runner is not None]
        identities = [driver.identity for driver in drivers if driver.identity is not None]
        return Load(
            waiting_prompt_tokens=sum(runner.core.waiting_prompt_tokens for runner in runners),
            live=self.num_live,
            pipelines=sum(replica.desk.status.ready for replica in self.replicas),
            fingerprint=identities[0].fingerprint if identities else "",
            accepted=sum(driver.sessions.num_opened for driver in drivers),
        )

    async def report_load(self) -> None:
        """Tell gateways what there is to do, when that has changed. Until cancelled."""
        told: dict[Peer, Load] = {}
        while True:
            load, links = self.load(), self.links
            for link in links:
                if told.get(link) != load:
                    link.send(load)
            told = dict.fromkeys(links, load)
            await asyncio.sleep(LOAD_PERIOD_S)

    async def drain(self) -> None:
        await asyncio.gather(*(replica.drain() for replica in self.replicas))

    def close_links(self) -> None:
        for replica in self.replicas:
            replica.desk.close_all()
        if self.front is not None:
            self.front.close_links()

    # --- what operators see and order

    @property
    def settings(self) -> SchedulerSettings:
        return self.replicas[0].driver.settings

    @property
    def draining(self) -> bool:
        return self.replicas[0].driver.draining

    @property
    def num_live(self) -> int:
        return sum(len(replica.driver.sessions) for replica in self.replicas)

    def live(self) -> Iterator[tuple[int, Runner, Session]]:
        """(replica, its runner, request)."""
        for replica in self.replicas:
            runner = replica.driver.runner
            if runner is not None:
                for session in replica.driver.sessions.live():
                    yield replica.index, runner, session

    def find(self, request_id: str) -> Session | None:
        for replica in self.replicas:
            session = replica.driver.sessions.of_request(request_id)
            if session is not None:
                return session
        return None

    def runner_of(self, job_id: int) -> Runner | None:
        """Of the replica that the job is or was on; None before that has begun."""
        return self.replicas[job_id % len(self.replicas)].driver.runner

    def reconfigure(self, settings: SchedulerSettings) -> None:
        """All replicas or none. Raises SettingsError."""
        drivers = [replica.driver for replica in self.replicas]
        for driver in drivers:
            if driver.runner is not None:
                settings.changed_core_config(driver.runner.core.config)
        for driver in drivers:
            driver.reconfigure(settings.model_copy(update={"journal": driver.settings.journal}))

    def begin_drain(self) -> None:
        for replica in self.replicas:
            replica.driver.drain()

    def resume(self) -> None:
        for replica in self.replicas:
            replica.driver.resume()

    def cancel_request(self, request_id: str) -> bool:
        return any([replica.driver.cancel_request(request_id) for replica in self.replicas])
