"""What an epoch tells about itself as it goes; the metrics implement it."""

from typing import Protocol

from fastserve_worker.messages import Plan


class Meter(Protocol):
    def computed(self, plan: Plan, compute_ns: int, blocked_ns: int) -> None:
        """On the stage's thread. `blocked_ns`: what it waited for copies before it computed."""

    def sent(self, send_ns: int) -> None:
        """Until the stream had taken an iteration's activations."""

    def faulted(self) -> None:
        """Once per epoch that ends so."""


class _NoMeter:
    def computed(self, plan: Plan, compute_ns: int, blocked_ns: int) -> None:
        """Nobody counts."""

    def sent(self, send_ns: int) -> None:
        """Nobody counts."""

    def faulted(self) -> None:
        """Nobody counts."""


NO_METER: Meter = _NoMeter()
