"""The gateways' side of the scheduler: who is connected, what they are told, what waits for the pipeline."""

from dataclasses import dataclass, field

from fastserve_scheduler.gateway_link import Peer
from fastserve_scheduler.hold import Hold
from fastserve_scheduler.messages import (
    Cancel,
    Finished,
    Hello,
    Refusal,
    Rejected,
    Status,
    StopReason,
    Submit,
)

GOING_AWAY = "the scheduler is going away"
DRAINED_BY_OPERATOR = "an operator has drained the scheduler"


@dataclass(slots=True)
class Desk:
    """Every gateway hears the present Hello and Status when it connects, and each change of them."""

    hello: Hello
    hold: Hold
    status: Status = field(default_factory=lambda: Status(False, "starting"))
    draining: bool = False
    #: What gateways are told while draining.
    draining_detail: str = GOING_AWAY
    _links: list[Peer] = field(default_factory=list)

    @property
    def links(self) -> tuple[Peer, ...]:
        return tuple(self._links)

    def opened(self, link: Peer) -> None:
        self._links.append(link)
        link.send(self.hello)
        link.send(self.status)

    def closed(self, link: Peer) -> None:
        link.close()
        if link in self._links:
            self._links.remove(link)

    def set_hello(self, hello: Hello) -> None:
        if hello != self.hello:
            self.hello = hello
            for link in self._links:
                link.send(hello)

    def set_status(self, status: Status) -> bool:
        """False when it is what everybody knows."""
        if status == self.status:
            return False
        self.status = status
        for link in self._links:
            link.send(status)
        return True

    def close_all(self) -> None:
        for link in self._links:
            link.close()

    def refuse_draining(self, link: Peer, submit: Submit) -> None:
        text = self.draining_detail
        self.hold.refuse(link, Rejected(submit.request_id, Refusal.DRAINING, text, 1))

    def cancel_held(self, cancel: Cancel, link: Peer) -> bool:
        """Whether the request was waiting here."""
        if not self.hold.remove(cancel.request_id):
            return False
        link.send(Finished(cancel.request_id, StopReason.CANCELLED, 0, 0, 0))
        return True
