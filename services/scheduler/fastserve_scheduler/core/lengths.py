"""How long answers will be, as far as anybody can tell, and how well each of them could tell so far.

Three guess at a job's arrival: the hint that came with it, the caller's limit, and the history of jobs with prompts of
about its length. When it has finished all three are compared with what came. A guesser is believed while it is right
within a factor of e (root of the mean square) and knows who is longer than whom: a constant guess can be close to every
answer and still order nothing. Integers only, so that it replays.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from fastserve_scheduler.core.job import Job

ONE = 1024
"""Lengths are compared by their binary logarithm, in units of 1/1024."""

NAT = 1477
"""log2(e): the error beyond which a guess is no better than none (docs/scheduling.md)."""

LEAST_CORRELATION_PERCENT = 50
"""Guesses must agree so far with the answers about who is longer."""

WEIGHT = 64
"""One finished job moves the means by 1/64 of the way."""

MIN_SEEN = 32
"""Fewer comparisons than this judge nobody. Until then a hint is believed, because somebody meant it, and no other."""

MIN_OF_A_KIND = 8
"""Finished jobs with prompts of one length class before their mean says more than that of all."""

SCALE = 1 << 16
"""Means are kept finer than what they are of, so that rounding down adds up to nothing."""

LEAST_SPREAD = ONE // 8
"""Guesses that spread less than this (9 %) say the same of everybody."""

UNKNOWN = -1


class Guesser(StrEnum):
    HINT = "hint"
    LIMIT = "limit"
    HISTORY = "history"


def log2(tokens: int) -> int:
    """Binary logarithm of `tokens` >= 1 in 1/1024, straight between powers of two."""
    power = tokens.bit_length() - 1
    return (power - 1) * ONE + (tokens * ONE >> power)


def exp2(log: int) -> int:
    """The inverse of `log2`, rounded down, at least 1."""
    power, rest = divmod(max(log, 0), ONE)
    return (ONE + rest << power) // ONE


@dataclass(slots=True)
class _Mean:
    """Moving mean; at first the plain one, so that it starts where the data is."""

    seen: int = 0
    _scaled: int = 0

    def add(self, value: int) -> None:
        self.seen += 1
        self._scaled += (value * SCALE - self._scaled) // min(self.seen, WEIGHT)

    @property
    def value(self) -> int:
        return self._scaled // SCALE


@dataclass(slots=True)
class Record:
    """How one guesser did."""

    believed: bool = False
    seen: int = 0
    _guess: _Mean = field(default_factory=_Mean)
    _truth: _Mean = field(default_factory=_Mean)
    _guess_square: _Mean = field(default_factory=_Mean)
    _truth_square: _Mean = field(default_factory=_Mean)
    _product: _Mean = field(default_factory=_Mean)
    _error_square: _Mean = field(default_factory=_Mean)

    def add(self, guess: int, truth: int) -> None:
        self.seen += 1
        self._guess.add(guess)
        self._truth.add(truth)
        self._guess_square.add(guess * guess)
        self._truth_square.add(truth * truth)
        self._product.add(guess * truth)
        self._error_square.add((guess - truth) ** 2)
        if self.seen >= MIN_SEEN:
            self.believed = self._error_square.value <= NAT * NAT and self._tells_apart()

    @property
    def log_error(self) -> float:
        """Root of the mean square of ln(guess / truth); 0 when nothing was compared."""
        return float(self._error_square.value**0.5 / NAT)

    def _tells_apart(self) -> bool:
        covariance = self._product.value - self._guess.value * self._truth.value
        guess_variance = self._guess_square.value - self._guess.value**2
        truth_variance = self._truth_square.value - self._truth.value**2
        if covariance <= 0 or guess_variance < LEAST_SPREAD**2:
            return False
        return covariance**2 * 100**2 >= LEAST_CORRELATION_PERCENT**2 * guess_variance * truth_variance


class Lengths:
    def __init__(self) -> None:
        self.records = {guesser: Record(believed=guesser is Guesser.HINT) for guesser in Guesser}
        self._in_order = tuple(self.records.values())
        self._all = _Mean()
        self._kinds: dict[int, _Mean] = {}

    def arrived(self, job: Job) -> None:
        """Everybody guesses."""
        limit = log2(job.max_output_tokens)
        hint = log2(job.expected_output_tokens) if job.expected_output_tokens else UNKNOWN
        history = self._history(job)
        job.guesses = (min(hint, limit), limit, min(history, limit))

    def finished(self, job: Job) -> None:
        """The job's answer is whole: everybody learns."""
        if job.generated == 0:
            return
        truth = log2(job.generated)
        for record, guess in zip(self._in_order, job.guesses, strict=True):
            if guess != UNKNOWN:
                record.add(guess, truth)
        self._all.add(truth)
        self._kinds.setdefault(job.prompt_tokens.bit_length(), _Mean()).add(truth)

    def believed(self, job: Job) -> int:
        """Logarithm of the output by the first guesser that is believed, or UNKNOWN."""
        for record, guess in zip(self._in_order, job.guesses, strict=True):
            if record.believed and guess != UNKNOWN:
                return guess
        return UNKNOWN

    def expected_tokens(self, job: Job) -> int:
        """The best there is: who is believed, else the history, else the limit."""
        guess = self.believed(job)
        _, limit, history = job.guesses
        return exp2(guess if guess != UNKNOWN else history if history != UNKNOWN else limit)

    def _history(self, job: Job) -> int:
        kind = self._kinds.get(job.prompt_tokens.bit_length())
        if kind is not None and kind.seen >= MIN_OF_A_KIND:
            return kind.value
        return self._all.value if self._all.seen else UNKNOWN
