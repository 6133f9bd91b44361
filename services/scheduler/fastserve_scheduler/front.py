"""Which replica a request goes to, for a scheduler that drives several.

A request joins the serving replica with the least waiting work and stays there. When its replica has not served for a
while and another does, it is handed over with the tokens it has, exactly as a gateway would submit it to the next
scheduler: its KV is gone either way, its client sees a pause. Every gateway has one branch of its stream to each
replica; what the replicas say of themselves is summed up here.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from fastserve_scheduler.gateway_link import GatewayLink
from fastserve_scheduler.inbox import Inbox
from fastserve_scheduler.inputs import CheckProgress, FromGateway, Input, LinkClosed, LinkOpened, Ordered
from fastserve_scheduler.messages import (
    Cancel,
    Finished,
    Hello,
    Refusal,
    Rejected,
    SchedulerMessage,
    Status,
    StopReason,
    Submit,
)
from fastserve_scheduler.replica import Replica
from fastserve_scheduler.timers import Timers

log = logging.getLogger(__name__)

LOOK_S = 0.25

#: A request that was accepted once is not refused for these: it waits, and is placed again.
_NOT_NOW = frozenset({Refusal.QUEUE_FULL_REQUESTS, Refusal.QUEUE_FULL_TOKENS, Refusal.NOT_READY, Refusal.DRAINING})


class Branch:
    """A gateway's stream as one replica knows it."""

    def __init__(self, link: GatewayLink, ended: Callable[["Branch", Finished | Rejected], bool]) -> None:
        self.link = link
        self._ended = ended
        self._closed = False

    @property
    def gateway_id(self) -> str:
        return self.link.gateway_id

    @property
    def closed(self) -> bool:
        return self._closed or self.link.closed

    def close(self) -> None:
        self._closed = True

    def send(self, message: SchedulerMessage) -> None:
        match message:
            case Hello() | Status():
                return  # the front speaks for all replicas
            case Finished() | Rejected():
                if not self._ended(self, message):
                    return
        self.link.send(message)


class Watcher:
    """Stands among a replica's gateways to hear what it says of itself."""

    gateway_id = ""
    closed = False

    def __init__(self, heard: Callable[[Hello | Status], None]) -> None:
        self._heard = heard

    def send(self, message: SchedulerMessage) -> None:
        if isinstance(message, Hello | Status):
            self._heard(message)

    def close(self) -> None:
        """The replica ends with its process."""


@dataclass(slots=True)
class _Standing:
    """What one replica says of itself."""

    hello: Hello
    status: Status
    since_s: float


@dataclass(slots=True)
class _Place:
    replica: int
    #: Kept for a request that was handed over: it may have to be placed again.
    moved: Submit | None = None


@dataclass(slots=True)
class Front:
    replicas: Sequence[Replica]
    #: Seconds without service after which a replica's requests are handed over.
    patience_s: float
    on_status: Callable[[Status], None]
    clock_s: Callable[[], float] = time.monotonic
    inbox: Inbox[Input] = field(default_factory=Inbox)
    handed_over: int = 0
    _standings: list[_Standing] = field(default_factory=list)
    _links: dict[GatewayLink, tuple[Branch, ...]] = field(default_factory=dict)
    _places: dict[str, _Place] = field(default_factory=dict)
    #: Live requests per replica.
    _loads: list[int] = field(default_factory=list)
    _homeless: dict[str, tuple[GatewayLink, Submit]] = field(default_factory=dict)
    _hello: Hello | None = None
    _status: Status = field(default_factory=lambda: Status(False, "starting"))

    async def run(self) -> None:
        """Until cancelled."""
        self._loads = [0] * len(self.replicas)
        now_s = self.clock_s()
        self._standings = [_Standing(r.desk.hello, r.desk.status, now_s) for r in self.replicas]
        for replica in self.replicas:
            replica.inbox.put_now(LinkOpened(Watcher(self._hearer(replica.index))))
        self._sum_up()
        timers = Timers(self.inbox)
        timers.after(LOOK_S, CheckProgress())
        try:
            while True:
                message = await self.inbox.get()
                await self._take(message)
                if isinstance(message, CheckProgress):
                    timers.after(LOOK_S, CheckProgress())
                await asyncio.sleep(0)  # the replicas' tasks are heard in between
        finally:
            timers.cancel_all()

    async def _take(self, message: Input) -> None:
        match message:
            case LinkOpened(GatewayLink() as link):
                self._opened(link)
            case LinkClosed(GatewayLink() as link):
                self._closed(link)
            case FromGateway(GatewayLink() as link, Submit() as submit):
                await self._submit(link, submit)
            case FromGateway(GatewayLink() as link, Cancel() as cancel):
                await self._cancel(link, cancel)
            case CheckProgress():
                self._look()
                await self._settle()
            case Ordered(act):
                act()
            case _:
                pass  # a message of a newer gateway

    @property
    def links(self) -> tuple[GatewayLink, ...]:
        return tuple(self._links)

    def close_links(self) -> None:
        for link in self._links:
            link.close()

    # --- gateways

    def _opened(self, link: GatewayLink) -> None:
        branches = tuple(Branch(link, self._ended) for _ in self.replicas)
        self._links[link] = branches
        for replica, branch in zip(self.replicas, branches, strict=True):
            replica.inbox.put_now(LinkOpened(branch))
        if self._hello is not None:
            link.send(self._hello)
        link.send(self._status)

    def _closed(self, link: GatewayLink) -> None:
        link.close()
        for replica, branch in zip(self.replicas, self._links.pop(link, ()), strict=False):
            replica.inbox.put_now(LinkClosed(branch))

    async def _submit(self, link: GatewayLink, submit: Submit) -> None:
        if link not in self._links:
            return  # it was read before the stream broke
        if submit.request_id in self._homeless:
            self._homeless[submit.request_id] = (link, submit)
            return
        place = self._places.get(submit.request_id)
        if place is None:
            place = self._places[submit.request_id] = _Place(self._choose())
            self._loads[place.replica] += 1
        await self._forward(link, place.replica, submit)

    async def _cancel(self, link: GatewayLink, cancel: Cancel) -> None:
        homeless = self._homeless.pop(cancel.request_id, None)
        if homeless is not None:
            had = len(homeless[1].delivered)
            link.send(Finished(cancel.request_id, StopReason.CANCELLED, 0, had, 0))
            return
        place = self._places.get(cancel.request_id)
        if place is not None and link in self._links:
            await self._forward(link, place.replica, cancel)

    async def _forward(self, link: GatewayLink, index: int, message: Submit | Cancel) -> None:
        await self.replicas[index].inbox.put(FromGateway(self._links[link][index], message))

    def _ended(self, branch: Branch, last: Finished | Rejected) -> bool:
        """Whether the gateway hears of it."""
        if isinstance(last, Rejected) and last.reason is Refusal.DUPLICATE_ID:
            return True
        place = self._places.pop(last.request_id, None)
        if place is None:
            return True
        self._loads[place.replica] -= 1
        if isinstance(last, Rejected) and place.moved is not None and last.reason in _NOT_NOW:
            self._homeless[last.request_id] = (branch.link, place.moved)
            return False
        return True

    # --- replicas

    def _hearer(self, index: int) -> Callable[[Hello | Status], None]:
        def heard(message: Hello | Status) -> None:
            standing = self._standings[index]
            if isinstance(message, Hello):
                standing.hello = message
            else:
                if message.ready != standing.status.ready:
                    standing.since_s = self.clock_s()
                    log.info("replica %s", "serves" if message.ready else "does not serve", extra={"replica": index})
                standing.status = message
            self._sum_up()

        return heard

    def _serving(self) -> list[int]:
        """Replicas that serve the same model as the first of them."""
        ready = [index for index, standing in enumerate(self._standings) if standing.status.ready]
        return [index for index in ready if self._same(ready[0], index)]

    def _same(self, one: int, other: int) -> bool:
        mine, theirs = self.replicas[one].driver.identity, self.replicas[other].driver.identity
        return mine is None or theirs is None or mine.fingerprint == theirs.fingerprint

    def _choose(self) -> int:
        """The least waiting prompt tokens, then the fewest requests."""
        candidates = self._serving() or range(len(self.replicas))
        return min(candidates, key=lambda index: (self._waiting_tokens(index), self._loads[index], index))

    def _waiting_tokens(self, index: int) -> int:
        runner = self.replicas[index].driver.runner
        return 0 if runner is None else runner.core.waiting_prompt_tokens

    def _sum_up(self) -> None:
        """Tell every gateway what has changed of the whole."""
        serving = self._serving()
        hellos = [self._standings[index].hello for index in serving] or [self._standings[0].hello]
        hello = replace(
            hellos[0],
            max_model_len=min(hello.max_model_len for hello in hellos),
            max_request_tokens=min(hello.max_request_tokens for hello in hellos),
        )
        news: list[Hello | Status] = []
        if hello != self._hello:
            self._hello = hello
            news.append(hello)
        status = Status(True, "") if serving else self._why_not()
        if status != self._status:
            self._status = status
            news.append(status)
            self.on_status(status)
        for link in self._links:
            for message in news:
                link.send(message)

    def _why_not(self) -> Status:
        details = [standing.status.detail for standing in self._standings]
        if len(set(details)) == 1:
            return Status(False, details[0])
        return Status(False, "; ".join(f"replica {index}: {detail}" for index, detail in enumerate(details)))

    # --- handing over

    def _look(self) -> None:
        """Whose requests have waited too long for their replica?"""
        if not self._serving():
            return
        now_s = self.clock_s()
        for replica, standing in zip(self.replicas, self._standings, strict=True):
            out_of_patience = not standing.status.ready and now_s - standing.since_s >= self.patience_s
            if out_of_patience and self._loads[replica.index] and not replica.driver.draining:
                replica.inbox.put_now(Ordered(partial(self._take_over, replica)))

    def _take_over(self, replica: Replica) -> None:
        """Called by the replica's own task."""
        moved = replica.driver.hand_over()
        for peer, submit in moved:
            place = self._places.pop(submit.request_id, None)
            if place is not None:
                self._loads[place.replica] -= 1
            if isinstance(peer, Branch):
                self._homeless[submit.request_id] = (peer.link, submit)
        self.handed_over += len(moved)
        if moved:
            log.warning("handed requests over", extra={"replica": replica.index, "requests": len(moved)})

    async def _settle(self) -> None:
        """Find every handed-over request a place. One whose stream is broken comes back with its gateway."""
        if not self._homeless or not self._serving():
            return
        homeless, self._homeless = self._homeless, {}
        for request_id, (link, submit) in homeless.items():
            if link not in self._links:
                continue
            place = self._places[request_id] = _Place(self._choose(), moved=submit)
            self._loads[place.replica] += 1
            await self._forward(link, place.replica, submit)
