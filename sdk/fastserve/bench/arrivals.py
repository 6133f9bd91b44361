"""When requests are sent, in seconds after the run begins. Open loop: nothing here depends on answers."""

import math
import random
from dataclasses import dataclass
from typing import Literal

RampShape = Literal["linear", "exponential"]


@dataclass(frozen=True, slots=True)
class Ramp:
    """The rate goes from `start_rps` to `end_rps` over the requests (not over time)."""

    shape: RampShape
    start_rps: float
    end_rps: float

    def __post_init__(self) -> None:
        if self.start_rps <= 0 or self.end_rps <= 0:
            raise ValueError("the rates of a ramp must be above 0")

    def rate_rps(self, index: int, total: int) -> float:
        progress = index / max(total - 1, 1)
        if self.shape == "linear":
            return self.start_rps + (self.end_rps - self.start_rps) * progress
        return float(self.start_rps * (self.end_rps / self.start_rps) ** progress)


def constant_rate(num_requests: int, rate_rps: float, burstiness: float, rng: random.Random) -> list[float]:
    """Gamma-distributed gaps with shape `burstiness` and mean 1/rate, all scaled by one factor so that the last request
    is sent at exactly num_requests / rate: a short run then has the rate it claims.

    Burstiness 1 is Poisson, less is burstier (coefficient of variation 1/sqrt(burstiness)), inf is a fixed gap. Rate
    inf: all at once. Raises ValueError for a rate or burstiness that is not above 0.
    """
    _require_positive(rate_rps, burstiness)
    if math.isinf(rate_rps):
        return [0.0] * num_requests
    offsets = _cumulate([_gap_s(rate_rps, burstiness, rng) for _ in range(num_requests)])
    factor = num_requests / rate_rps / offsets[-1] if offsets else 1.0
    return [offset * factor for offset in offsets]


def ramped(num_requests: int, ramp: Ramp, burstiness: float, rng: random.Random) -> list[float]:
    """As `constant_rate`, each gap with the ramp's rate at its request, and not scaled afterwards."""
    _require_positive(ramp.start_rps, burstiness)
    return _cumulate([_gap_s(ramp.rate_rps(i, num_requests), burstiness, rng) for i in range(num_requests)])


def _require_positive(rate_rps: float, burstiness: float) -> None:
    if not rate_rps > 0:
        raise ValueError(f"the request rate must be above 0 (got {rate_rps})")
    if not burstiness > 0:
        raise ValueError(f"burstiness must be above 0 (got {burstiness})")


def _gap_s(rate_rps: float, burstiness: float, rng: random.Random) -> float:
    if math.isinf(burstiness):
        return 1 / rate_rps
    return rng.gammavariate(burstiness, 1 / (rate_rps * burstiness))


def _cumulate(gaps_s: list[float]) -> list[float]:
    offsets: list[float] = []
    now = 0.0
    for gap in gaps_s:
        now += gap
        offsets.append(now)
    return offsets
