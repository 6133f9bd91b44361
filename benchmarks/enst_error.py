"""How true the Estimated Next Scheduled Time is, and whether finish rates or the place in the queue make it truer.

OPT-13B on one A100 in the simulator, as scheduler_swapping.py. Whenever a job's KV is ordered out, four estimates of
when it runs again are noted, and compared with when it did:

    paper      min(T_promote, T_execute), as published: everybody above is demoted level by level, nobody finishes
    finishing  T_execute thinned by the share of jobs that were seen to finish at each level instead of being demoted
    place      T_execute and the quanta of those who are ahead in the job's own queue
    both       finishing and place

    python benchmarks/enst_error.py --jobs 400 --load 1.6 --seeds 3 --plot enst.png
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from matplotlib.figure import Figure
from scheduler_swapping import BATCH, CAPACITY, Setting, Variant, simulator

from fastserve_scheduler.core import SchedulerCore
from fastserve_scheduler.core.commands import RunIteration, SwapDirection
from fastserve_scheduler.core.job import Job
from fastserve_scheduler.sim.workload import poisson

KINDS = ("paper", "finishing", "place", "both")
_NS_PER_S = 1e9


def execute_ns(quanta_ns: Sequence[int], sizes: Sequence[int], batch: int, finishing: Sequence[float]) -> list[float]:
    """T_execute of each level when the share `finishing[k]` of those who come to level k ends there.

    Who ends at a level uses half of its quantum. All zero: the published estimate.
    """
    total_ns, passing, times = 0.0, 0.0, []
    for quantum_ns, size, ends in zip(quanta_ns, sizes, finishing, strict=True):
        times.append(total_ns / batch)
        passing += size
        total_ns += quantum_ns * passing * (1 - ends / 2)
        passing *= 1 - ends
    return times


@dataclass(frozen=True, slots=True)
class Guess:
    """Made when a job was sent out at `at_ns`; estimates in ns from then on. `promoted`: T_promote was the sooner."""

    at_ns: int
    estimates_ns: tuple[float, ...]
    promoted: bool


@dataclass(slots=True)
class Observer:
    """Looks at every plan when it starts; `seen`: (guess, time until it ran in ns)."""

    core: SchedulerCore
    seen: list[tuple[Guess, int]] = field(default_factory=list)
    _out: dict[int, Guess] = field(default_factory=dict)
    _level: dict[int, int] = field(default_factory=dict)
    _ended: list[int] = field(default_factory=list)

    def watch(self, now_ns: int, plan: RunIteration) -> None:
        self._count_ended()
        for item in plan.items:
            job = self.core.jobs[item.job_id]
            self._level[job.job_id] = job.level
            guess = self._out.pop(job.job_id, None)
            if guess is not None:
                self.seen.append((guess, now_ns - guess.at_ns))
        for op in plan.swaps:
            if op.direction is SwapDirection.OUT and op.job_id in self.core.jobs:
                self._out[op.job_id] = self._guess(self.core.jobs[op.job_id], now_ns)

    def _count_ended(self) -> None:
        self._ended += [0] * (len(self.core.order.level_sizes()) - len(self._ended))
        for job_id in [job_id for job_id in self._level if job_id not in self.core.jobs]:
            self._ended[self._level.pop(job_id)] += 1

    def _guess(self, job: Job, now_ns: int) -> Guess:
        order, batch = self.core.order, self.core.config.max_batch_size
        quanta_ns, sizes = order.quanta_ns(), order.level_sizes()
        shares = [e / max(1, e + d) for e, d in zip(self._ended, order.demotions(), strict=True)]
        nobody = [0.0] * len(sizes)
        ahead = sum(other.rank < job.rank for other in self.core.line.jobs() if other.level == job.level)
        place_ns = ahead * quanta_ns[job.level] / batch
        paper_ns = execute_ns(quanta_ns, sizes, batch, nobody)[job.level]
        thinned_ns = execute_ns(quanta_ns, sizes, batch, shares)[job.level]
        promote_ns = self.core.enst.promote_ns(job, now_ns)
        estimates = (paper_ns, thinned_ns, paper_ns + place_ns, thinned_ns + place_ns)
        return Guess(now_ns, tuple(min(promote_ns, ns) for ns in estimates), promote_ns < paper_ns)


def observe(setting: Setting, kv_ranking: str, seed: int) -> list[tuple[Guess, int]]:
    variant = Variant("", "proactive", "enst" if kv_ranking == "enst" else "order")
    simulated = simulator(variant, setting)
    observer = Observer(simulated.core)
    simulated.watch = observer.watch
    simulated.run(poisson(setting.jobs, setting.rate, seed), setting.blocks, host_slots=setting.slots)
    return observer.seen


def summary(seen: Sequence[tuple[Guess, int]], kind: int) -> tuple[float, float, float, float]:
    """Mean error, mean absolute error, median error in seconds (late is positive), and rank correlation."""
    guessed = [guess.estimates_ns[kind] / _NS_PER_S for guess, _ in seen]
    actual = [after_ns / _NS_PER_S for _, after_ns in seen]
    errors = sorted(a - g for a, g in zip(actual, guessed, strict=True))
    mean = sum(errors) / len(errors)
    absolute = sum(map(abs, errors)) / len(errors)
    return mean, absolute, errors[len(errors) // 2], rank_correlation(guessed, actual)


def rank_correlation(left: Sequence[float], right: Sequence[float]) -> float:
    """Spearman's: 1 when the order of the guesses is the order of the events, which is what ranking needs."""
    a, b = _ranks(left), _ranks(right)
    mean = (len(a) - 1) / 2
    covariance = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    spread = (sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b)) ** 0.5
    return covariance / spread if spread else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    """Equal values share the mean of their ranks."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks, begin = [0.0] * len(values), 0
    while begin < len(order):
        end = begin
        while end < len(order) and values[order[end]] == values[order[begin]]:
            end += 1
        for index in order[begin:end]:
            ranks[index] = (begin + end - 1) / 2
        begin = end
    return ranks


def save_plot(seen: Sequence[tuple[Guess, int]], path: Path, title: str) -> None:
    """Actual over estimated time, for the published estimate and the one with both corrections."""
    figure = Figure(figsize=(11, 5), layout="constrained")
    for axes, kind in zip(figure.subplots(1, 2, sharex=True, sharey=True), (0, 3), strict=True):
        for promoted, label in ((True, "T_promote is sooner"), (False, "T_execute is sooner")):
            pairs = [(g.estimates_ns[kind] / 1e9, ns / 1e9) for g, ns in seen if g.promoted is promoted]
            axes.plot([x for x, _ in pairs], [y for _, y in pairs], ".", markersize=2, alpha=0.5, label=label)
        longest = max((ns / 1e9 for _, ns in seen), default=1.0)
        axes.plot([0, longest], [0, longest], color="black", linewidth=0.8)
        axes.set(title=f"{KINDS[kind]}: {title}", xlabel="estimated (s)", ylabel="until it ran (s)")
        axes.legend()
        axes.grid(visible=True, alpha=0.3)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--jobs", type=int, default=400)
    add("--load", type=float, default=1.6, help="arrival rate over capacity")
    add("--seeds", type=int, default=3)
    add("--alpha", type=float, default=10.0, help="seconds")
    add("--ranking", choices=("order", "enst"), default="order")
    add("--plot", type=Path, help="of the first seed")
    options = parser.parse_args()
    setting = Setting(options.jobs, CAPACITY * options.load, 931, 8192, options.alpha, 25.0)
    runs = [observe(setting, options.ranking, seed) for seed in range(1, options.seeds + 1)]
    print(f"{sum(map(len, runs))} swaps of {options.seeds} seeds, batch {BATCH}, {setting}; mean over seeds")
    print(f"{'':12}{'mean error':>14}{'mean |error|':>14}{'median error':>14}{'rank corr.':>14}")
    for kind, name in enumerate(KINDS):
        rows = [summary(seen, kind) for seen in runs]
        means = [sum(column) / len(column) for column in zip(*rows, strict=True)]
        print(f"{name:12}" + "".join(f"{value:14.3f}" for value in means), flush=True)
    if options.plot:
        save_plot(runs[0], options.plot, f"load {options.load:g}, alpha {options.alpha:g} s")


if __name__ == "__main__":
    main()
