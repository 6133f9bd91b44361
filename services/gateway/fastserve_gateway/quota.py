"""What one API key may ask for in a minute, over all gateways: token buckets in the state store, one call a request."""

from collections.abc import Mapping
from dataclasses import dataclass

from fastserve_common.buckets import Draw, Drawn
from fastserve_common.errors import ResourceExhaustedError
from fastserve_gateway.metrics import Metrics
from fastserve_gateway.shared import SharedCounts, caller

REQUESTS, TOKENS = "requests", "tokens"


@dataclass(frozen=True, slots=True)
class Quota:
    """How one request left the buckets of its key."""

    draws: tuple[Draw, ...]
    drawn: Drawn

    def headers(self) -> Mapping[str, str]:
        """As the OpenAI API names them."""
        found: dict[str, str] = {}
        for draw, level in zip(self.draws, self.drawn.levels, strict=True):
            found[f"x-ratelimit-limit-{draw.name}"] = str(draw.per_min)
            found[f"x-ratelimit-remaining-{draw.name}"] = str(int(level))
            found[f"x-ratelimit-reset-{draw.name}"] = f"{draw.until_full_s(level):.3f}s"
        return found


class QuotaExceededError(ResourceExhaustedError):
    """The key has used up what it may ask for in a minute."""

    def __init__(self, quota: Quota) -> None:
        short = [d for d, level in zip(quota.draws, quota.drawn.levels, strict=True) if d.cost > level]
        limits = " and ".join(f"{d.per_min} {d.name} a minute (--rate-limit-{d.name}-per-min)" for d in short)
        super().__init__(
            f"this key may ask for {limits}; try again in {quota.drawn.wait_s:.3f} s",
            retry_after_ms=max(1, int(quota.drawn.wait_s * 1000) + 1),
        )
        self.quota = quota


class Quotas:
    """0: no limit."""

    def __init__(self, shared: SharedCounts, metrics: Metrics, *, requests_per_min: int, tokens_per_min: int) -> None:
        self._shared = shared
        self._metrics = metrics
        self._requests_per_min = requests_per_min
        self._tokens_per_min = tokens_per_min

    async def take(self, num_tokens: int) -> Quota | None:
        """For one request of the `caller`; None: there is no limit, or nobody to ask. Raises QuotaExceededError.

        A request of more tokens than a minute has costs them all: it must wait, but it is not refused for ever.
        """
        draws = self._draws(num_tokens)
        if not draws:
            return None
        owner = caller.get()
        drawn = await self._shared.ask(lambda store: store.draw(owner, draws))
        if drawn is None:
            self._metrics.quota_unchecked.inc()
            return None
        quota = Quota(draws, drawn)
        if not drawn.granted:
            self._metrics.admission_rejected("rate_limit")
            raise QuotaExceededError(quota)
        return quota

    def _draws(self, num_tokens: int) -> tuple[Draw, ...]:
        asked = ((REQUESTS, self._requests_per_min, 1), (TOKENS, self._tokens_per_min, num_tokens))
        return tuple(Draw(name, per_min, min(cost, per_min)) for name, per_min, cost in asked if per_min)
