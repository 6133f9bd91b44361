"""All groups of schedulers that serve the model, as one: found in the state store, chosen among, told of as one.

A request goes to the serving group with the least to do per pipeline: fewest prompt tokens waiting, then fewest
requests, then the one whose turn it is; as the schedulers say a few times a second, and with what this gateway has
sent since. It stays there. Another group takes it only when its own refuses it as it comes, or when its scheduler did
not come back in time.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass, replace

import grpc.aio

from fastserve.v1 import scheduler_pb2
from fastserve_common.cluster_state import sum_states
from fastserve_common.state import DEFAULT_GROUP, StateError, StateStore, group_of, in_group
from fastserve_gateway.codec import CancelReason
from fastserve_gateway.engine.events import ClusterView
from fastserve_gateway.engine.link import LEADER_MEMBER, LEADER_POLL_S, ROLE, LinkLostError, SchedulerLink
from fastserve_gateway.engine.sequence import Sequence

log = logging.getLogger(__name__)

#: A group that nobody leads, and that has nothing of ours, is remembered for so long: until then it is missed.
FORGET_S = 600.0

SHUTTING_DOWN = "the gateway is shutting down"


@dataclass(slots=True, eq=False)
class _Group:
    link: SchedulerLink
    task: "asyncio.Task[None] | None" = None
    #: It was found in the state store.
    seen: bool = False
    #: When it was found there last.
    seen_s: float = 0.0
    #: The number of the last choice that fell on it.
    turn: int = 0

    def pressure(self) -> tuple[float, float, int]:
        load, link = self.link.load, self.link
        tokens = (load.waiting_tokens + link.sent_tokens) / load.pipelines
        return tokens, (load.live + link.sent_live) / load.pipelines, self.turn


class SchedulerGroups:
    """To the rest of the gateway it is the scheduler."""

    def __init__(
        self,
        store: StateStore,
        gateway_id: str,
        *,
        reconnect_timeout_s: float,
        only: Several[str] = (),
        on_change: Callable[[ClusterView], None] = lambda view: None,
    ) -> None:
        """`only`: of these groups; none: of all there are. `on_change` is called whenever `view` has changed."""
        self.view = ClusterView()
        self._store = store
        self._gateway_id = gateway_id
        self._reconnect_timeout_s = reconnect_timeout_s
        self._only = tuple(only)
        self._on_change = on_change
        self._groups: dict[str, _Group] = {}
        self._serial = 0
        self._choices = 0
        self._strangers: tuple[str, ...] = ()
        for name in self._only or (DEFAULT_GROUP,):
            self._add(name)

    # --- requests

    @property
    def num_live(self) -> int:
        return sum(group.link.num_live for group in self._groups.values())

    def free_wire_id(self, wanted: str) -> str:
        """`wanted`, unless a scheduler may still speak of an earlier request under that id."""
        if not any(group.link.knows(wanted) for group in self._groups.values()):
            return wanted
        self._serial += 1
        return f"{wanted}~{self._serial}"

    def submit(self, sequence: Sequence) -> None:
        """From here until it ended, failed or was cancelled the sequence hears what its scheduler says."""
        connected = [group for group in self._groups.values() if group.link.view.connected]
        self._choose(self._serving() or connected or self._groups.values()).submit(sequence)

    def cancel(self, wire_id: str, reason: CancelReason) -> None:
        """Forget the sequence and tell its scheduler. No effect for one that is not live."""
        for group in self._groups.values():
            group.link.cancel(wire_id, reason)

    def _choose(self, among: Iterable[_Group]) -> SchedulerLink:
        chosen = min(among, key=_Group.pressure)
        self._choices += 1
        chosen.turn = self._choices
        return chosen.link

    def _elsewhere(self, sequence: Sequence, tried: Several[str]) -> bool:
        """Whether another group, none of those that were tried, takes it."""
        others = [group for group in self._serving() if group.link.group not in tried]
        if others:
            self._choose(others).submit(sequence)
        return bool(others)

    # --- for people

    async def scheduler_state(self) -> scheduler_pb2.GetStateResponse:
        """What the schedulers show to people, added up. Raises LinkLostError, AioRpcError."""
        links = [group.link for group in self._groups.values() if group.link.view.connected]
        if not links:
            raise LinkLostError(self.view.detail)
        answers = await asyncio.gather(*(link.scheduler_state() for link in links), return_exceptions=True)
        states: list[scheduler_pb2.GetStateResponse] = []
        for answer in answers:
            if isinstance(answer, scheduler_pb2.GetStateResponse):
                states.append(answer)
            elif not isinstance(answer, LinkLostError | grpc.aio.AioRpcError):
                raise answer
        if not states and isinstance(answers[0], BaseException):
            raise answers[0]
        return sum_states(states)

    def counts(self) -> Mapping[str, tuple[bool, int]]:
        """Of each group by name: whether new requests may go there, and how many answers are there."""
        serving = self._serving()
        return {group.link.group: (group in serving, group.link.num_live) for group in self._known()}

    # --- which there are

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                self._begin()
                await self._look()
                self._begin()
                await asyncio.sleep(LEADER_POLL_S)
        finally:
            self.view = replace(self.view, connected=False, ready=False, detail=SHUTTING_DOWN)
            await _end(list(self._groups.values()))

    def _begin(self) -> None:
        for group in self._groups.values():
            if group.task is None:
                group.task = asyncio.create_task(group.link.run(), name=f"group-{group.link.group}")

    async def _look(self) -> None:
        """A store that is away changes nothing; every link says so itself."""
        try:
            members = await self._store.members(ROLE)
        except StateError:
            return
        now_s = asyncio.get_running_loop().time()
        for member in members:
            name = group_of(member)
            if member == in_group(LEADER_MEMBER, name) and (not self._only or name in self._only):
                group = self._groups.get(name) or self._add(name)
                group.seen, group.seen_s = True, now_s
        await self._forget(now_s)

    def _add(self, name: str) -> _Group:
        link = SchedulerLink(
            self._store,
            self._gateway_id,
            group=name,
            reconnect_timeout_s=self._reconnect_timeout_s,
            on_change=lambda _: self._changed(),
            elsewhere=self._elsewhere,
        )
        added = self._groups[name] = _Group(link)
        return added

    async def _forget(self, now_s: float) -> None:
        gone = [name for name, group in self._groups.items() if self._is_gone(name, group, now_s)]
        groups = [self._groups.pop(name) for name in gone]
        await _end(groups)
        if gone:
            log.info("forgot groups that are gone", extra={"groups": gone})
            self._changed()

    def _is_gone(self, name: str, group: _Group, now_s: float) -> bool:
        if name in (self._only or (DEFAULT_GROUP,)):
            return False
        return now_s - group.seen_s > FORGET_S and not group.link.view.connected and not group.link.num_live

    # --- all as one

    def _known(self) -> list[_Group]:
        """Those that were ever found, or all while none was."""
        return [group for group in self._groups.values() if group.seen] or list(self._groups.values())

    def _ready(self) -> list[_Group]:
        """The default group first, the others by name."""
        ready = [group for group in self._groups.values() if group.link.view.serving]
        return sorted(ready, key=lambda group: (group.link.group != DEFAULT_GROUP, group.link.group))

    def _serving(self) -> list[_Group]:
        """Groups that serve the same model as the first that has said which; the first of all while none has."""
        ready = self._ready()
        model = next((group.link.load.fingerprint for group in ready if group.link.load.fingerprint), "")
        return [group for group in ready if group.link.load.fingerprint == model] if model else ready[:1]

    def _changed(self) -> None:
        serving = self._serving()
        strangers = tuple(
            group.link.group for group in self._ready() if group not in serving and group.link.load.fingerprint
        )
        if strangers != self._strangers:
            self._strangers = strangers
            if strangers:
                log.warning("groups that serve another model get no requests", extra={"groups": strangers})
        view = self._sum_up(serving)
        if view != self.view:
            self.view = view
            self._on_change(view)

    def _sum_up(self, serving: list[_Group]) -> ClusterView:
        """Limits are the lowest, so that a request fits wherever it goes."""
        known = self._known()
        connected = [group for group in known if group.link.view.connected]
        views = [group.link.view for group in serving or connected or known]
        limits = [view.max_model_len for view in views if view.max_model_len is not None]
        detail = "" if serving and len(known) > 1 else _details(known)
        return replace(
            views[0],
            connected=bool(connected),
            ready=bool(serving),
            detail=views[0].detail if len(known) == 1 else detail,
            max_model_len=min(limits, default=None),
        )


def _details(groups: list[_Group]) -> str:
    """What is missing, in words."""
    said = [group.link.view.detail for group in groups]
    if len(dict.fromkeys(said)) == 1:
        return said[0]
    return "; ".join(f"group {group.link.group}: {group.link.view.detail}" for group in groups)


async def _end(groups: list[_Group]) -> None:
    tasks = [group.task for group in groups if group.task is not None]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
