"""What is kept of a run: a row of numbers, and each job's latency."""

import gc
from collections.abc import Sequence
from pathlib import Path

from fastserve_common.load.stats import mean, percentile
from fastserve_scheduler.core.commands import Command, PlanItem, RunIteration
from fastserve_scheduler.core.events import Event, IterationDone
from fastserve_scheduler.core.scheduler import SchedulerCore
from fastserve_scheduler.sim.capacity import completed_per_second
from fastserve_scheduler.sim.fleet import Fleet
from fastserve_scheduler.sim.recorder import Finished
from fastserve_scheduler.sim.report import Setup, in_window, to_result

from .case import Case, plant_of, requests_of, with_rate

DROP_FIRST, DROP_LAST = 0.15, 0.10
"""Of the jobs of a long run: filling up and running empty."""

NAMES = {
    "mean_normalised_latency": "mean",
    "p95_normalised_latency": "p95",
    "p99_normalised_latency": "p99",
    "swap_blocked_share": "blocked",
    "queueing_share": "queueing",
    "recomputed_share": "recomputed",
    "peak_kv_tokens": "peak_kv",
    "enst_error_mean_s": "enst_error_s",
    "iterations": "iterations",
    "promotions": "promotions",
}
"""Keys of a simulator's result that are kept, and their short names."""

IN_SECONDS = {
    "mean_ttft_ms": "ttft",
    "p99_itl_ms": "itl99",
    "mean_e2el_ms": "jct",
    "p99_e2el_ms": "jct99",
    "longest_wait_ms": "wait",
}

CLASSES = ((1, 63), (64, 255), (256, 1 << 30))
"""Short, middle and long answers, in tokens."""

Row = dict[str, float | list[float]]


def measure(case: Case, traces: Path | None = None) -> Row:
    """Simulate it; JSON-ready. Seconds, seconds per output token, tokens, GB."""
    case = with_rate(case)
    requests = requests_of(case, traces)
    watch = Promoted() if case.watch else None
    fleet = Fleet(plant_of(case), log=watch.see if watch else None)
    if watch:
        watch.core = fleet.replicas[0].core
    gc.disable()  # a run makes no cycles worth looking for, and looking takes a tenth of its time
    outcome = fleet.run(requests)
    gc.enable()
    drop_first, drop_last = (DROP_FIRST, DROP_LAST) if case.window else (0.0, 0.0)
    result = to_result(Setup("", case.rate, drop_first=drop_first, drop_last=drop_last), outcome)
    row: Row = {short: _number(result[name]) for name, short in NAMES.items()}
    row |= {short: _number(result[name]) / 1000 for name, short in IN_SECONDS.items()}
    row["gb_out"] = _number(result["swapped_out_bytes"]) / 1e9
    row["gb_in"] = _number(result["swapped_in_bytes"]) / 1e9
    finished = outcome.recorder.finished
    row["completed"] = float(len(finished))
    row["capacity"] = completed_per_second(finished)
    row |= _lengths(in_window(outcome, drop_first, drop_last))
    row["each"] = [round(value, 5) for _, value in sorted(zip(finished.number, finished.per_token_s(), strict=True))]
    if len(case.pattern) > 2:
        begin_s = case.pattern[0][0]
        row["recovery"], row["peak_live"] = recovery(finished, begin_s, begin_s + case.pattern[1][0])
    if watch:
        row["promoted"] = watch.share
    return row


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)


def _lengths(finished: Finished) -> Row:
    """Means and P95 by class of answer length, and the mean of the longest quarter."""
    row: Row = {"class_mean": [], "class_p95": []}
    pairs = sorted(zip(finished.output, finished.per_token_s(), strict=True))
    means, tails = [], []
    for low, high in CLASSES:
        values = sorted(value for output, value in pairs if low <= output <= high) or [0.0]
        means.append(mean(values))
        tails.append(percentile(values, 95))
    row["class_mean"], row["class_p95"] = means, tails
    row["longest_quarter"] = mean([value for _, value in pairs[len(pairs) * 3 // 4 :]])
    return row


def recovery(finished: Finished, begin_s: float, end_s: float) -> tuple[float, float]:
    """Seconds after `end_s` until no more requests are in the system than the most there were in the half of the time
    before `begin_s`; and the most there were at all."""
    changes = sorted(
        [(at_ns / 1e9, 1) for at_ns in finished.arrived] + [(at_ns / 1e9, -1) for at_ns in finished.finished]
    )
    live = usual = peak = 0
    back_s = 0.0
    for at_s, change in changes:
        live += change
        peak = max(peak, live)
        if begin_s / 2 <= at_s < begin_s:
            usual = max(usual, live)
        if at_s >= end_s and live <= usual:
            back_s = at_s
            break
    return max(0.0, back_s - end_s), float(peak)


class Promoted:
    """Share of the slots of all iterations that went to jobs above their own queue: where a job would be that had used
    the same time and never been promoted. A ticket counts as above."""

    def __init__(self) -> None:
        self.core: SchedulerCore | None = None
        self._slots = self._above = 0
        #: By job: queue and time used in it, had there been no promotion.
        self._own: dict[int, tuple[int, int]] = {}
        self._plans: dict[tuple[int, int], Sequence[PlanItem]] = {}

    @property
    def share(self) -> float:
        return self._above / self._slots if self._slots else 0.0

    def see(self, now_ns: int, event: Event, commands: Sequence[Command]) -> None:
        """Called with each event and the core's answer to it."""
        if self.core is None:
            return  # the stages come up before anybody can be told of the core
        quanta_ns = self.core.order.quanta_ns()
        if isinstance(event, IterationDone):
            for item in self._plans.pop((event.epoch, event.seq), ()):
                self._charge(item.job_id, event.compute_ns, quanta_ns)
        for command in commands:
            if isinstance(command, RunIteration) and command.items:
                self._plans[command.epoch, command.seq] = command.items
                self._look(command.items, self.core)

    def _charge(self, job_id: int, spent_ns: int, quanta_ns: Sequence[int]) -> None:
        level, used_ns = self._own[job_id]
        used_ns += spent_ns
        if used_ns >= quanta_ns[level]:
            level, used_ns = min(level + 1, len(quanta_ns) - 1), 0
        self._own[job_id] = (level, used_ns)

    def _look(self, items: Sequence[PlanItem], core: SchedulerCore) -> None:
        for item in items:
            job = core.jobs[item.job_id]
            own, _ = self._own.setdefault(item.job_id, (job.level, 0))
            self._slots += 1
            self._above += job.ticket or job.level < own
