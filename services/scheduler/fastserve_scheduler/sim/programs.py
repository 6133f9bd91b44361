"""Agent programs: chains of calls, of which the next comes when the last one is answered and thought about.

A call's prompt is what was said before in the program and something new. Everything about a program is drawn from its
own number, so programs are the same under every policy, whatever order their calls end in.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from fastserve_scheduler.sim.arrivals import DrawLengths, Rates, Request, cut, unit_gaps

_S = 1_000_000_000


@dataclass(slots=True)
class Programs:
    """`mean_calls`: geometric, at least 1. `think_s`: mean of the exponential pause before the next call. `remember`:
    prompt and answer of a call are part of the next prompt; a program ends before it outgrows `max_total` tokens.
    """

    rates: Rates
    draw: DrawLengths
    seed: int
    mean_calls: float = 4.0
    think_s: float = 1.0
    remember: bool = True
    max_total: int = 2048
    burstiness: float = 1.0
    _left: dict[str, "_Course"] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.mean_calls < 1 or self.think_s < 0:
            raise ValueError(f"a program has at least one call and no negative pauses (got {self})")

    def requests(self) -> Iterator[Request]:
        """The first call of each program. Endless."""
        times = random.Random(f"{self.seed}:programs")
        for number, at_s in enumerate(self.rates.stretch(unit_gaps(self.burstiness, times))):
            rng = random.Random(f"{self.seed}:program:{number}")
            course = _Course(rng, self._num_calls(rng))
            request = self._call(f"program-{number}", course, round(at_s * _S), said=0)
            if request is not None:
                yield request

    def after(self, request: Request, now_ns: int) -> Request | None:
        """The next call of the program, or None when that was the last one."""
        course = self._left.pop(request.program, None)
        if course is None:
            return None
        pause_s = course.rng.expovariate(1 / self.think_s) if self.think_s else 0.0
        said = request.prompt_tokens + request.output_tokens if self.remember else 0
        return self._call(request.program, course, now_ns + round(pause_s * _S), said)

    def _num_calls(self, rng: random.Random) -> int:
        if self.mean_calls == 1:
            return 1
        return 1 + int(math.log(1 - rng.random()) / math.log(1 - 1 / self.mean_calls))

    def _call(self, program: str, course: "_Course", at_ns: int, said: int) -> Request | None:
        num_input, num_output = cut(*self.draw(course.rng), None, self.max_total)
        if said and said + num_input + num_output > self.max_total:
            return None
        course.done += 1
        if course.done < course.num_calls:
            self._left[program] = course
        return Request(at_ns, said + num_input, num_output, program=program, call=course.done - 1)


@dataclass(slots=True)
class _Course:
    """Where a program stands."""

    rng: random.Random
    num_calls: int
    done: int = 0
