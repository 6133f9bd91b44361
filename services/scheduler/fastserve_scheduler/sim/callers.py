"""What callers say of the length of an answer before it is there.

A limit that is the true length of the answer, as load generators send it, is an oracle to a scheduler that learns from
limits. Callers who do not know how long it will be ask for all there is room for.
"""

import random
from dataclasses import dataclass, replace

from fastserve_scheduler.sim.arrivals import Request


@dataclass(frozen=True, slots=True)
class Callers:
    """`room`: prompt and answer together at most, the limit of callers who know nothing; None: the limit is the truth.
    `hint_error`: deviation of ln(hint / truth) of the hints they send, None: they send none."""

    seed: int
    room: int | None = None
    hint_error: float | None = None

    def says(self, request: Request) -> Request:
        """The request as it is sent. The same for the same request, whenever it comes."""
        limit = request.output_tokens
        if self.room is not None:
            limit = max(limit, self.room - request.prompt_tokens)
        hint = 0
        if self.hint_error is not None:
            about = request.program or request.at_ns
            rng = random.Random(
                f"{self.seed}:hint:{about}:{request.call}:{request.prompt_tokens}:{request.output_tokens}"
            )
            hint = min(max(1, round(request.output_tokens * rng.lognormvariate(0, self.hint_error))), limit)
        return replace(request, max_output_tokens=limit, expected_output_tokens=hint)
