"""Everything that can be put into the scheduler's inbox."""

from collections.abc import Callable
from dataclasses import dataclass

from fastserve_scheduler.core.profile import Profile
from fastserve_scheduler.gateway_link import Peer
from fastserve_scheduler.kv_session import KvSession
from fastserve_scheduler.messages import GatewayMessage, Ready, StageMessage


@dataclass(frozen=True, slots=True)
class LinkOpened:
    link: Peer


@dataclass(frozen=True, slots=True)
class LinkClosed:
    link: Peer


@dataclass(frozen=True, slots=True)
class GraceOver:
    """The requests of a closed link that nobody took over are aborted now."""

    link: Peer


@dataclass(frozen=True, slots=True)
class FromGateway:
    link: Peer
    message: GatewayMessage


@dataclass(frozen=True, slots=True)
class FromStage:
    stage: int
    message: StageMessage


@dataclass(frozen=True, slots=True)
class Joined:
    """All stages are configured for `epoch` and agree."""

    epoch: int
    stages: tuple[Ready, ...]


@dataclass(frozen=True, slots=True)
class Lost:
    """The stream to a stage ended: its KV is gone, and everything in flight."""

    stage: int
    why: str


@dataclass(frozen=True, slots=True)
class PipelineChanged:
    """What the pipeline waits for has changed."""


@dataclass(frozen=True, slots=True)
class HostGranted:
    """Slots that every stage can swap with."""

    session: KvSession
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HostLost:
    """All slots of the session are gone, and what was in them."""

    session: KvSession


@dataclass(frozen=True, slots=True)
class ProfileKnown:
    profile: Profile


@dataclass(frozen=True, slots=True)
class ProfileFailed:
    """The search goes on; its state says why."""


@dataclass(frozen=True, slots=True)
class WakeUp:
    """The core's timer ran out. `number`: which wish of the core; older ones are void."""

    number: int


@dataclass(frozen=True, slots=True)
class CheckProgress:
    """Is a stage silent for too long?"""


@dataclass(frozen=True, slots=True)
class HoldOver:
    """Requests that came before the pipeline was ready have waited long enough."""


@dataclass(frozen=True, slots=True)
class Drain:
    """New requests are refused from now on."""


@dataclass(frozen=True, slots=True)
class Ordered:
    """An operator's order, carried out in its turn. `act` raises nothing."""

    act: Callable[[], None]


Input = (
    LinkOpened
    | LinkClosed
    | GraceOver
    | FromGateway
    | FromStage
    | Joined
    | Lost
    | PipelineChanged
    | HostGranted
    | HostLost
    | ProfileKnown
    | ProfileFailed
    | WakeUp
    | CheckProgress
    | HoldOver
    | Drain
    | Ordered
)
