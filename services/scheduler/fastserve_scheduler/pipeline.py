"""The stages as one pipeline: found in the state store, connected, configured, checked against each other.

Every attempt to join the stages is a *round* with an epoch of its own, higher than any before it, also over restarts
of the scheduler (the generation is its upper half). A round begins when a stream breaks, when a stage comes back, or
when the core voids what is in flight; it ends when all stages answered Configure and agree. Nothing but plans of the
joined round's epoch is ever sent.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from fastserve_common.state import DEFAULT_GROUP, LEASE_TTL_S, StateError, StateStore, stage_member
from fastserve_scheduler.inbox import Inbox
from fastserve_scheduler.inputs import FromStage, Input, Joined, Lost, PipelineChanged
from fastserve_scheduler.kv_messages import HostArena
from fastserve_scheduler.messages import Configure, Measure, Ready, StageMessage, WirePlan
from fastserve_scheduler.stage_link import StageLink

log = logging.getLogger(__name__)

POLL_S = 0.25
#: A stage that has not answered Configure for this long is taken for frozen.
CONFIGURE_TIMEOUT_S = 10.0
#: A stage whose membership expired this long ago, while the store answers, is taken for frozen.
ABSENT_S = LEASE_TTL_S
FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.1, 2.0
_GENERATION_SHIFT = 32


@dataclass(slots=True)
class _Slot:
    """What is known of one stage."""

    address: str = ""
    incarnation: str = ""
    seen_s: float = 0.0
    link: StageLink | None = None
    ready: Ready | None = None
    backoff_s: float = FIRST_BACKOFF_S
    retry_at_s: float = 0.0
    #: The present stream has answered once.
    heard: bool = False
    why_down: str = ""


@dataclass(frozen=True, slots=True)
class StageView:
    """For people: one stage as the pipeline sees it."""

    stage: int
    up: bool
    address: str


@dataclass(slots=True)
class Pipeline:
    store: StateStore
    num_stages: int
    generation: int
    inbox: Inbox[Input]
    clock_s: Callable[[], float]
    replica: int = 0
    group: str = DEFAULT_GROUP
    epoch: int = 0
    joined: bool = False
    _slots: list[_Slot] = field(default_factory=list)
    _round: int = 0
    _round_began_s: float = 0.0
    _detail: str = ""
    _closing: bool = False

    def __post_init__(self) -> None:
        self._slots = [_Slot() for _ in range(self.num_stages)]
        self.epoch = self.generation << _GENERATION_SHIFT

    # --- what the driver asks for

    def begin_round(self) -> None:
        """Void everything: a new epoch, Configure to every connected stage."""
        self._round += 1
        self.epoch = (self.generation << _GENERATION_SHIFT) + self._round
        self.joined = False
        self._round_began_s = self.clock_s()
        for slot in self._slots:
            slot.ready = None
        if self._all_connected():
            # The last stage first: a stage that is configured may connect to the next one at once.
            for stage in reversed(range(self.num_stages)):
                self._configure(stage)
        self._announce()

    def _all_connected(self) -> bool:
        return all(slot.link is not None and slot.link.connected for slot in self._slots)

    def send_plan(self, plan: WirePlan) -> None:
        """To stage 0, at once. A plan of an epoch that is over goes nowhere: its round's end is already told."""
        link = self._slots[0].link
        if self.joined and plan.epoch == self.epoch and link is not None:
            link.send(plan)

    def send_measure(self, order: Measure) -> None:
        """To every stage."""
        if self.joined and order.epoch == self.epoch:
            for slot in self._slots:
                if slot.link is not None:
                    slot.link.send(order)

    def give_up_on(self, stage: int, why: str) -> None:
        """Close the stream to a stage that broke its word; it is connected again after a pause."""
        link = self._slots[stage].link
        if link is not None:
            link.close(why)

    @property
    def detail(self) -> str:
        """What is missing, in words; empty when joined."""
        return self._detail

    @property
    def host_arena(self) -> HostArena | None:
        """What all stages can swap with; None when they cannot, or not with the same one, or are not joined."""
        hosts = [slot.ready.host for slot in self._slots if slot.ready is not None]
        alike = self.joined and len(hosts) == self.num_stages and all(host == hosts[0] for host in hosts)
        return hosts[0] if alike and hosts[0].num_slots else None

    def views(self) -> tuple[StageView, ...]:
        return tuple(StageView(i, s.heard, s.address) for i, s in enumerate(self._slots))

    # --- finding and connecting

    async def run(self) -> None:
        """Poll the store and keep the streams open until cancelled."""
        try:
            while True:
                try:
                    self._observe(await self.store.members("stage"))
                except StateError as error:
                    # Streams that are open go on without the store.
                    log.warning("cannot read the members, will retry: %s", error)
                    self._refresh_seen()
                self._connect_missing()
                self._check_round()
                await asyncio.sleep(POLL_S)
        finally:
            await self._close_all()

    async def _close_all(self) -> None:
        self._closing = True
        links = [slot.link for slot in self._slots if slot.link is not None]
        for link in links:
            link.close("the scheduler is going away")
        for link in links:
            await link.wait_closed()

    def _observe(self, members: dict[str, dict[str, str]]) -> None:
        now_s = self.clock_s()
        for stage, slot in enumerate(self._slots):
            info = members.get(stage_member(self.replica, stage, self.group))
            if info is None:
                if slot.link is not None and now_s - slot.seen_s > ABSENT_S:
                    slot.link.close("it stopped renewing its membership")
                elif slot.link is None:
                    slot.address = slot.incarnation = ""
                continue
            slot.seen_s = now_s
            if info["incarnation"] != slot.incarnation or info["address"] != slot.address:
                slot.address, slot.incarnation = info["address"], info["incarnation"]
                slot.backoff_s, slot.retry_at_s, slot.why_down = FIRST_BACKOFF_S, 0.0, ""
                if slot.link is not None:
                    slot.link.close("another process took its place")
        self._announce()

    def _refresh_seen(self) -> None:
        for slot in self._slots:
            slot.seen_s = self.clock_s()

    def _connect_missing(self) -> None:
        now_s = self.clock_s()
        for stage, slot in enumerate(self._slots):
            if slot.link is None and slot.address and now_s >= slot.retry_at_s:
                slot.link = StageLink(
                    stage, slot.address, slot.incarnation, self._on_connected, self._on_message, self._on_closed
                )
                slot.retry_at_s = now_s + slot.backoff_s
                slot.backoff_s = min(2 * slot.backoff_s, LAST_BACKOFF_S)

    def _check_round(self) -> None:
        if self.joined or self.clock_s() - self._round_began_s < CONFIGURE_TIMEOUT_S:
            return
        if self._all_connected():
            for slot in self._slots:
                if slot.link is not None and slot.ready is None:
                    slot.link.close("it did not answer Configure")

    def _configure(self, stage: int) -> None:
        link = self._slots[stage].link
        if link is not None:
            last = stage == self.num_stages - 1
            link.send(Configure(self.epoch, "" if last else self._slots[stage + 1].address))

    # --- what the stages say

    def _on_connected(self, link: StageLink) -> None:
        if self._slots[link.stage].link is link:
            self.begin_round()

    def _on_message(self, link: StageLink, message: StageMessage) -> None:
        if isinstance(message, Ready):
            self._on_ready(link, message)
        elif isinstance(message, HostArena):
            self._on_host(link, message)
        else:
            self.inbox.put_now(FromStage(link.stage, message))

    def _on_ready(self, link: StageLink, ready: Ready) -> None:
        slot = self._slots[link.stage]
        if slot.link is not link or ready.epoch != self.epoch:
            return
        slot.ready, slot.heard = ready, True
        slot.backoff_s, slot.why_down = FIRST_BACKOFF_S, ""
        if not self.joined and self._disagreement() == "" and self._missing() == "":
            self.joined = True
            stages = tuple(s.ready for s in self._slots if s.ready is not None)
            if len({ready.host for ready in stages}) > 1:
                log.warning("the stages do not share host memory, so nothing is swapped: %s", [r.host for r in stages])
            self.inbox.put_now(Joined(self.epoch, stages))
        self._announce()

    def _on_host(self, link: StageLink, host: HostArena) -> None:
        slot = self._slots[link.stage]
        if slot.link is link and slot.ready is not None:
            slot.ready = replace(slot.ready, host=host)
            self.inbox.put_now(PipelineChanged())

    def _on_closed(self, link: StageLink, why: str) -> None:
        slot = self._slots[link.stage]
        if slot.link is not link:
            return
        where = {"stage": link.stage, "address": link.address}
        if self._closing:
            log.info("let go of a stage: %s", why, extra=where)
        else:
            log.warning("lost a stage: %s", why, extra=where)
        slot.link, slot.ready, slot.heard, slot.why_down = None, None, False, why
        if not link.connected:
            self._announce()
            return
        self.inbox.put_now(Lost(link.stage, why))
        self.begin_round()

    # --- is it one pipeline?

    def _missing(self) -> str:
        """What the round waits for: first a stage that is not there, then one that has not answered."""
        for stage, slot in enumerate(self._slots):
            if slot.link is None or not slot.link.connected or slot.why_down:
                name = f"waiting for stage {stage} of {self.num_stages}"
                why = f": {slot.why_down}" if slot.why_down else ""
                return f"{name} at {slot.address}{why}" if slot.address else f"{name}: no such member"
        for stage, slot in enumerate(self._slots):
            if slot.ready is None:
                return f"waiting for stage {stage} of {self.num_stages} at {slot.address} to answer"
        return ""

    def _disagreement(self) -> str:
        known = [(stage, slot.ready) for stage, slot in enumerate(self._slots) if slot.ready is not None]
        for stage, ready in known:
            if ready.stage != stage or ready.num_stages != self.num_stages:
                mine = f"stage {stage} of {self.num_stages}"
                return f"{mine} says it is stage {ready.stage} of {ready.num_stages}"
        if known:
            first_stage, first = known[0]
            for stage, ready in known[1:]:
                for name in ("fingerprint", "block_size", "max_model_len", "vocab_size", "dtype"):
                    if getattr(ready, name) != getattr(first, name):
                        left, right = getattr(first, name), getattr(ready, name)
                        words = name.replace("_", " ")
                        return f"stages {first_stage} and {stage} differ in {words}: {left!r} and {right!r}"
        return ""

    def _announce(self) -> None:
        detail = "" if self.joined else self._disagreement() or self._missing()
        if detail != self._detail:
            self._detail = detail
            self.inbox.put_now(PipelineChanged())
