"""From what happened to each request to the numbers of a run. Pure: no clock, no I/O."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from fastserve_common.load import stats
from fastserve_common.load.classes import length_class, length_class_name

Metric = Literal["ttft", "tpot", "itl", "e2el"]
METRICS: tuple[Metric, ...] = ("ttft", "tpot", "itl", "e2el")


@dataclass(slots=True)
class Outcome:
    """One request as the client saw it. All times in seconds since the run began.

    `arrival_s` and `token_counts` have one entry per piece of the answer; a piece can carry several tokens.
    """

    planned_s: float = 0.0
    #: When the request was allowed to be sent: `planned_s`, or later when --max-concurrency held it back.
    released_s: float = 0.0
    sent_s: float = 0.0
    end_s: float = 0.0
    arrival_s: list[float] = field(default_factory=list)
    token_counts: list[int] = field(default_factory=list)
    input_tokens: int = 0
    output_tokens: int = 0
    text: str = ""
    #: Empty when the answer is complete.
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def ttft_s(self) -> float:
        """Send to first piece."""
        return self.arrival_s[0] - self.sent_s if self.arrival_s else 0.0

    @property
    def latency_s(self) -> float:
        """Send to end of answer."""
        return self.end_s - self.sent_s

    @property
    def tpot_s(self) -> float:
        """(latency - TTFT) / (output - 1); 0 for one token or none."""
        return (self.latency_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    @property
    def normalised_s(self) -> float:
        """Latency / output tokens: the whole wait, spread over what it brought."""
        return self.latency_s / max(self.output_tokens, 1)

    @property
    def gaps_s(self) -> list[float]:
        """Between successive pieces."""
        return [later - earlier for earlier, later in itertools.pairwise(self.arrival_s)]

    def token_arrivals(self) -> list[tuple[float, float]]:
        """(time, tokens) of each piece. Where pieces do not tell how many tokens they carry, the answer's tokens are
        spread over them evenly."""
        share = self.output_tokens / max(sum(self.token_counts), 1)
        return [(time_s, count * share) for time_s, count in zip(self.arrival_s, self.token_counts, strict=True)]

    @property
    def lag_s(self) -> float:
        """How late the client itself sent."""
        return self.sent_s - self.released_s

    @property
    def queue_s(self) -> float:
        """How long --max-concurrency held the request back."""
        return self.released_s - self.planned_s


@dataclass(frozen=True)
class Run:
    """All outcomes of a run that lasted `duration_s`. Failed requests count in `failed` and nowhere else."""

    outcomes: Sequence[Outcome]
    duration_s: float

    @cached_property
    def completed(self) -> list[Outcome]:
        return [o for o in self.outcomes if o.ok]

    @property
    def failed(self) -> int:
        return len(self.outcomes) - len(self.completed)

    @property
    def input_tokens(self) -> int:
        return sum(o.input_tokens for o in self.completed)

    @property
    def output_tokens(self) -> int:
        return sum(o.output_tokens for o in self.completed)

    def per_second(self, count: float) -> float:
        return count / self.duration_s if self.duration_s > 0 else 0.0

    def samples_s(self, metric: Metric) -> list[float]:
        """Sorted. TPOT: of answers with more than one token; ITL: every gap of every answer."""
        match metric:
            case "ttft":
                values = [o.ttft_s for o in self.completed]
            case "tpot":
                values = [o.tpot_s for o in self.completed if o.output_tokens > 1]
            case "itl":
                values = [gap for o in self.completed for gap in o.gaps_s]
            case "e2el":
                values = [o.latency_s for o in self.completed]
        return sorted(values)

    def normalised_s(self) -> list[float]:
        return sorted(o.normalised_s for o in self.completed)

    def longest_gaps_s(self) -> list[float]:
        """Each answer's longest gap between pieces, sorted."""
        return sorted(max(gaps) for o in self.completed if (gaps := o.gaps_s))

    def num_good(self, slo_ms: Mapping[str, float]) -> int:
        """Requests that meet all the given limits (keys: ttft, tpot, e2el)."""
        return sum(all(_slo_value_ms(o, name) <= limit for name, limit in slo_ms.items()) for o in self.completed)

    def peak_concurrency(self) -> int:
        return stats.peak_overlap([(o.sent_s, o.end_s) for o in self.outcomes])

    def peak_output_tokens_per_s(self) -> float:
        return stats.peak_per_second([arrival for o in self.completed for arrival in o.token_arrivals()])

    def by_length_class(self) -> dict[str, list[Outcome]]:
        """Completed requests by output length; classes without any are left out."""
        found: dict[int, list[Outcome]] = {}
        for outcome in self.completed:
            found.setdefault(length_class(outcome.output_tokens), []).append(outcome)
        return {length_class_name(index): found[index] for index in sorted(found)}

    def fairness(self) -> float:
        """Jain's index over the length classes' mean normalised latencies: 1 when long and short wait alike."""
        return stats.jain_fairness(
            [stats.mean([o.normalised_s for o in group]) for group in self.by_length_class().values()]
        )


def _slo_value_ms(outcome: Outcome, name: str) -> float:
    values = {"ttft": outcome.ttft_s, "tpot": outcome.tpot_s, "e2el": outcome.latency_s}
    return values[name] * 1000
