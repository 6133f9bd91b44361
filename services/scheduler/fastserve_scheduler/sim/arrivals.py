"""When requests come, one at a time: a run of any length needs the memory of its live requests only.

Independent arrivals at a rate that may change over time: gaps are drawn at unit rate and stretched through the integral
of the rate, so a burst changes when requests come and not how they cluster. Randomness lives here and nowhere in the
core; the same seed gives the same requests, whatever they are served by.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fastserve_common.load.lengths import LengthModel
from fastserve_common.load.traces import read_rows

_S = 1_000_000_000

#: One (input, output) pair of token counts.
DrawLengths = Callable[[random.Random], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Request:
    """`output_tokens`: where the model stops. `max_output_tokens`: the limit it was sent with; 0: the same.

    `expected_output_tokens`: what somebody guessed, 0: nobody. `program`: calls of one agent share it.
    """

    at_ns: int
    prompt_tokens: int
    output_tokens: int
    max_output_tokens: int = 0
    expected_output_tokens: int = 0
    service_class: str = ""
    program: str = ""
    #: Number of the call within its program.
    call: int = 0


@dataclass(frozen=True, slots=True)
class Rates:
    """Requests per second over time: (seconds, rate) after each other, then from the start again.

    Raises ValueError when no segment has both a length and a rate.
    """

    segments: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if any(not seconds > 0 or rate < 0 for seconds, rate in self.segments):
            raise ValueError(f"segments need a length above 0 and a rate of 0 or more (got {self.segments})")
        if not any(rate > 0 for _, rate in self.segments):
            raise ValueError("a load without any rate above 0 has no requests")

    @property
    def mean(self) -> float:
        return sum(s * rate for s, rate in self.segments) / sum(s for s, _ in self.segments)

    def stretch(self, units: Iterator[float]) -> Iterator[float]:
        """Seconds at which the integral of the rate has grown by each of `units`, one after the other."""
        around = itertools.cycle(self.segments)
        left_s, rate = next(around)
        now_s = 0.0
        for unit in units:
            while unit > left_s * rate:
                unit -= left_s * rate
                now_s += left_s
                left_s, rate = next(around)
            now_s += unit / rate if rate else 0.0
            left_s -= unit / rate if rate else 0.0
            yield now_s


def constant(rate: float) -> Rates:
    return Rates(((math.inf, rate),))


def diurnal(mean_rate: float, swing: float, period_s: float, steps: int = 48) -> Rates:
    """A day: the rate goes as a sine between mean (1 - swing) and mean (1 + swing), lowest at the start."""
    if not 0 <= swing <= 1:
        raise ValueError(f"the swing of a day must be between 0 and 1 (got {swing})")
    wave = [-math.cos(2 * math.pi * (step + 0.5) / steps) for step in range(steps)]
    return Rates(tuple((period_s / steps, mean_rate * (1 + swing * height)) for height in wave))


def bursts(rate: float, factor: float, burst_s: float, every_s: float) -> Rates:
    """`factor` times the rate for `burst_s` seconds at the end of every `every_s`."""
    if not 0 < burst_s < every_s:
        raise ValueError(f"a burst must be shorter than the time between bursts (got {burst_s} of {every_s} s)")
    return Rates(((every_s - burst_s, rate), (burst_s, rate * factor)))


def steps(rates: Sequence[tuple[float, float]]) -> Rates:
    """(seconds, rate) after each other; the last one stays."""
    return Rates((*rates[:-1], (math.inf, rates[-1][1])))


def lengths_of(model: LengthModel, max_input: int | None = None, max_total: int | None = None) -> DrawLengths:
    """Pairs of the model; inputs cut to `max_input`, then outputs so that the pair fits `max_total`."""

    def draw(rng: random.Random) -> tuple[int, int]:
        return cut(*model.draw(rng), max_input, max_total)

    return draw


def fixed_lengths(num_input: int, num_output: int) -> DrawLengths:
    return lambda rng: (num_input, num_output)


def cut(num_input: int, num_output: int, max_input: int | None, max_total: int | None) -> tuple[int, int]:
    """Never below one token each way."""
    if max_total is not None:
        max_input = max_total - 1 if max_input is None else min(max_input, max_total - 1)
    if max_input is not None:
        num_input = min(num_input, max_input)
    if max_total is not None:
        num_output = max(1, min(num_output, max_total - num_input))
    return num_input, num_output


def independent(rates: Rates, draw: DrawLengths, seed: int, burstiness: float = 1.0) -> Iterator[Request]:
    """Endless. `burstiness`: shape of the gamma gaps; 1 is Poisson, less is burstier (coefficient of variation
    1/sqrt(burstiness)), inf is fixed gaps. Lengths and gaps are drawn apart: another rate, the same requests."""
    times, lengths = random.Random(f"{seed}:times"), random.Random(f"{seed}:lengths")
    for at_s in rates.stretch(unit_gaps(burstiness, times)):
        yield Request(round(at_s * _S), *draw(lengths))


def unit_gaps(burstiness: float, rng: random.Random) -> Iterator[float]:
    """Gaps of mean 1. Raises ValueError for a burstiness that is not above 0."""
    if not burstiness > 0:
        raise ValueError(f"burstiness must be above 0 (got {burstiness})")
    while True:
        if math.isinf(burstiness):
            yield 1.0
        elif burstiness == 1:
            yield rng.expovariate(1.0)
        else:
            yield rng.gammavariate(burstiness, 1 / burstiness)


def at_once(count: int, draw: DrawLengths, seed: int) -> Iterator[Request]:
    """All at the start: a saturated system."""
    lengths = random.Random(f"{seed}:lengths")
    return (Request(0, *draw(lengths)) for _ in range(count))


@dataclass(frozen=True, slots=True)
class Trace:
    """A window of a recorded trace, which must be in order of time. `rate` None: the recorded one, else every gap of
    the window is stretched by one factor so that its mean rate is this."""

    kind: str
    path: Path
    start_s: float = 0.0
    duration_s: float = math.inf
    rate: float | None = None
    max_input: int | None = None
    max_total: int | None = None

    def requests(self) -> Iterator[Request]:
        """Raises TraceError for a file that cannot be read, when that shows; ValueError for an empty window."""
        factor = self._factor()
        first_s: float | None = None
        last_ns = 0
        for time_s, num_input, num_output in self._window():
            first_s = time_s if first_s is None else first_s
            last_ns = max(last_ns, round((time_s - first_s) * factor * _S))
            yield Request(last_ns, *cut(num_input, num_output, self.max_input, self.max_total))

    def recorded_rate(self) -> float:
        """Requests per second in the window. Raises ValueError when there are fewer than two."""
        count, first_s, last_s = 0, 0.0, 0.0
        for time_s, _, _ in self._window():
            first_s = time_s if count == 0 else first_s
            last_s, count = time_s, count + 1
        if count < 2 or last_s <= first_s:
            raise ValueError(f"{self.path} has no two requests apart in that window")
        return (count - 1) / (last_s - first_s)

    def _factor(self) -> float:
        return 1.0 if self.rate is None else self.recorded_rate() / self.rate

    def _window(self) -> Iterator[tuple[float, int, int]]:
        begin_s: float | None = None
        for row in read_rows(self.kind, self.path):
            begin_s = row.time_s + self.start_s if begin_s is None else begin_s
            if row.time_s >= begin_s + self.duration_s:
                return
            if row.time_s >= begin_s:
                yield row.time_s, row.input_tokens, row.output_tokens
