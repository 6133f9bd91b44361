"""What clients see, in memory that grows by one small row per finished request and not by its tokens."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from fastserve_scheduler.core.commands import FinishReason, RejectReason, RunIteration
from fastserve_scheduler.sim.arrivals import Request

_S = 1_000_000_000

GAP_BITS = 7
"""Gaps between tokens are counted in bins that are 2^-7 wide, relative to themselves: within 0.4 % of the middle."""


class Finished:
    """Completed requests, one row each, in the order of completion. Times in ns; `max_gap` between tokens, 0 where
    there is one only."""

    COLUMNS = (
        "number", "arrived", "first", "finished", "prompt", "output", "max_gap", "executing", "iterations", "replica",
    )  # fmt: skip
    __slots__ = COLUMNS

    def __init__(self) -> None:
        self.number, self.arrived, self.first, self.finished = array("q"), array("q"), array("q"), array("q")
        self.prompt, self.output, self.max_gap = array("q"), array("q"), array("q")
        self.executing, self.iterations, self.replica = array("q"), array("q"), array("q")

    def __len__(self) -> int:
        return len(self.number)

    def chosen(self, rows: Iterable[int]) -> "Finished":
        """These rows only."""
        rows = tuple(rows)
        found = Finished()
        for name in self.COLUMNS:
            column: array[int] = getattr(self, name)
            getattr(found, name).extend(column[row] for row in rows)
        return found

    def latency_s(self) -> list[float]:
        return [(end - begin) / _S for begin, end in zip(self.arrived, self.finished, strict=True)]

    def first_s(self) -> list[float]:
        return [(first - begin) / _S for begin, first in zip(self.arrived, self.first, strict=True)]

    def longest_waits_s(self) -> list[float]:
        """Longest time without a token, from arrival on."""
        return [max(first, gap / _S) for first, gap in zip(self.first_s(), self.max_gap, strict=True)]

    def per_token_s(self) -> list[float]:
        """End-to-end latency over output tokens, not sorted."""
        return [latency / output for latency, output in zip(self.latency_s(), self.output, strict=True)]

    def token_gap_s(self) -> list[float]:
        """(latency - time to first token) / (output - 1); 0 for answers of one token."""
        rows = zip(self.first, self.finished, self.output, strict=True)
        return [(end - first) / _S / (output - 1) if output > 1 else 0.0 for first, end, output in rows]


@dataclass(slots=True)
class _Live:
    number: int
    request: Request
    replica: int
    first_ns: int = -1
    last_ns: int = 0
    max_gap_ns: int = 0
    output: int = 0
    executing_ns: int = 0
    iterations: int = 0


@dataclass(slots=True)
class Recorder:
    """The observer of a fleet."""

    finished: Finished = field(default_factory=Finished)
    rejected: int = 0
    arrived: int = 0
    peak_live: int = 0
    peak_tokens_per_s: int = 0
    #: Gaps between tokens of one answer by bin.
    gap_bins: dict[int, int] = field(default_factory=dict)
    gap_sum_ns: int = 0
    _live: dict[int, _Live] = field(default_factory=dict)
    _second: int = -1
    _second_tokens: int = 0

    def arrive(self, job_id: int, request: Request, replica: int) -> None:
        self._live[job_id] = _Live(self.arrived, request, replica, last_ns=request.at_ns)
        self.arrived += 1
        self.peak_live = max(self.peak_live, len(self._live))

    @property
    def num_live(self) -> int:
        return len(self._live)

    def request_of(self, job_id: int) -> Request:
        return self._live[job_id].request

    def delivered(self, plan: RunIteration, began_ns: int, now_ns: int) -> None:
        live, spent_ns = self._live, now_ns - began_ns
        tokens = same = gap_ns = 0
        for item in plan.items:
            job = live[item.job_id]
            job.executing_ns += spent_ns
            job.iterations += 1
            if not item.sample:
                continue
            tokens += 1
            waited_ns = now_ns - job.last_ns
            job.last_ns = now_ns
            job.output = item.output_position + 1
            if job.first_ns < 0:
                job.first_ns = now_ns
                continue
            if waited_ns > job.max_gap_ns:
                job.max_gap_ns = waited_ns
            if waited_ns == gap_ns:
                same += 1
            else:
                self._count_gaps(gap_ns, same)
                gap_ns, same = waited_ns, 1
        self._count_gaps(gap_ns, same)
        self._count_tokens(tokens, now_ns)

    def ended(self, job_id: int, reason: FinishReason | RejectReason, now_ns: int) -> None:
        job = self._live.pop(job_id)
        if isinstance(reason, RejectReason) or job.output == 0:
            self.rejected += 1
            return
        rows = self.finished
        rows.number.append(job.number)
        rows.arrived.append(job.request.at_ns)
        rows.first.append(job.first_ns)
        rows.finished.append(now_ns)
        rows.prompt.append(job.request.prompt_tokens)
        rows.output.append(job.output)
        rows.max_gap.append(job.max_gap_ns)
        rows.executing.append(job.executing_ns)
        rows.iterations.append(job.iterations)
        rows.replica.append(job.replica)

    def _count_gaps(self, gap_ns: int, count: int) -> None:
        if count:
            shift = max(gap_ns.bit_length() - GAP_BITS - 1, 0)
            gap_bin = (shift << GAP_BITS + 1) + (gap_ns >> shift)
            self.gap_bins[gap_bin] = self.gap_bins.get(gap_bin, 0) + count
            self.gap_sum_ns += gap_ns * count

    def _count_tokens(self, tokens: int, now_ns: int) -> None:
        second = now_ns // _S
        if second != self._second:
            self._second, self._second_tokens = second, 0
        self._second_tokens += tokens
        if self._second_tokens > self.peak_tokens_per_s:
            self.peak_tokens_per_s = self._second_tokens


def gaps_by_size(gap_bins: dict[int, int]) -> list[tuple[float, int]]:
    """(gap in seconds, how many), smallest first; a bin is worth its middle."""
    found = []
    for gap_bin in sorted(gap_bins):
        shift, low = gap_bin >> GAP_BITS + 1, gap_bin & (1 << GAP_BITS + 1) - 1
        found.append(((low + 0.5 * (shift > 0)) * (1 << shift) / _S, gap_bins[gap_bin]))
    return found
