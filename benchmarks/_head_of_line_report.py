"""Rows, table and picture of head_of_line.py."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from matplotlib.figure import Figure

from fastserve.bench.runner import Measured
from fastserve_common.load import stats


@dataclass(frozen=True, slots=True)
class Row:
    """One run of one policy. Normalised latency: end-to-end seconds per output token."""

    policy: str
    load: float
    repeat: int
    offered_rps: float
    completed: int
    failed: int
    duration_s: float
    mean_normalised_s: float
    p95_normalised_s: float
    p99_normalised_s: float
    mean_ttft_s: float
    p95_ttft_s: float
    output_tokens_per_s: float
    longest_gap_s: float
    p95_longest_gap_s: float
    preemptions: int
    length_class_fairness: float
    p99_client_lag_s: float
    client_cpu_share: float

    @classmethod
    def of(
        cls, policy: str, load: float, repeat: int, offered_rps: float, measured: Measured, preemptions: int
    ) -> Self:
        run = measured.run
        normalised_s, ttft_s, gaps_s = run.normalised_s(), run.samples_s("ttft"), run.longest_gaps_s()
        return cls(
            policy=policy,
            load=load,
            repeat=repeat,
            offered_rps=offered_rps,
            completed=len(run.completed),
            failed=run.failed,
            duration_s=run.duration_s,
            mean_normalised_s=stats.mean(normalised_s),
            p95_normalised_s=stats.percentile(normalised_s, 95),
            p99_normalised_s=stats.percentile(normalised_s, 99),
            mean_ttft_s=stats.mean(ttft_s),
            p95_ttft_s=stats.percentile(ttft_s, 95),
            output_tokens_per_s=run.per_second(run.output_tokens),
            longest_gap_s=gaps_s[-1] if gaps_s else 0.0,
            p95_longest_gap_s=stats.percentile(gaps_s, 95),
            preemptions=preemptions,
            length_class_fairness=run.fairness(),
            p99_client_lag_s=stats.percentile(sorted(o.lag_s for o in run.outcomes), 99),
            client_cpu_share=measured.cpu_s / run.duration_s,
        )

    def sentence(self) -> str:
        return (
            f"{self.policy} at {self.load:.0%} ({self.completed} of {self.completed + self.failed} requests, "
            f"{self.duration_s:.0f} s): normalised mean {self.mean_normalised_s:.3f} P95 {self.p95_normalised_s:.3f} "
            f"s/token, TTFT mean {self.mean_ttft_s:.2f} s, {self.output_tokens_per_s:.1f} tokens/s"
        )


Value = Callable[[Row], float]


@dataclass(frozen=True, slots=True)
class Rows:
    """The runs of one policy at one load, one per repeat, and those of the baseline with the same arrivals."""

    runs: Sequence[Row]
    baseline: Sequence[Row]

    def mean(self, value: Value) -> float:
        return stats.mean([value(row) for row in self.runs])

    def ratio(self, value: Value) -> float | None:
        """Mean over the repeats of policy / baseline, paired by their arrivals. None without the baseline."""
        base = {row.repeat: value(row) for row in self.baseline}
        pairs = [value(row) / base[row.repeat] for row in self.runs if base.get(row.repeat)]
        return stats.mean(pairs) if pairs else None


def grouped(rows: Sequence[Row], baseline: str) -> dict[tuple[float, str], Rows]:
    """By load, then policy, in the order of the rows."""
    keys = dict.fromkeys((row.load, row.policy) for row in sorted(rows, key=lambda row: row.load))

    def of(load: float, policy: str) -> list[Row]:
        return [row for row in rows if (row.load, row.policy) == (load, policy)]

    return {(load, policy): Rows(of(load, policy), of(load, baseline)) for load, policy in keys}


def table(rows: Sequence[Row], baseline: str) -> str:
    """Markdown. Every row says its load and run length; ratios below 1 are better than the baseline."""
    lines = [
        "| load | policy | requests | run (s) | mean (s/token) | P95 | P99 | mean / "
        f"{baseline} | P95 / {baseline} | TTFT mean (s) | TTFT P95 | tokens/s | longest gap (s) | preemptions |",
        "|" + "---:|" + "---|" + "---:|" * 12,
    ]
    for (load, policy), group in grouped(rows, baseline).items():
        cells = [
            f"{load:.0%}",
            policy,
            f"{sum(row.completed for row in group.runs)}",
            f"{group.mean(lambda row: row.duration_s):.0f}",
            f"{group.mean(lambda row: row.mean_normalised_s):.3f}",
            f"{group.mean(lambda row: row.p95_normalised_s):.3f}",
            f"{group.mean(lambda row: row.p99_normalised_s):.3f}",
            _ratio(group.ratio(lambda row: row.mean_normalised_s)),
            _ratio(group.ratio(lambda row: row.p95_normalised_s)),
            f"{group.mean(lambda row: row.mean_ttft_s):.2f}",
            f"{group.mean(lambda row: row.p95_ttft_s):.2f}",
            f"{group.mean(lambda row: row.output_tokens_per_s):.1f}",
            f"{max(row.longest_gap_s for row in group.runs):.2f}",
            f"{group.mean(lambda row: row.preemptions):.0f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def save_plot(rows: Sequence[Row], path: Path) -> None:
    """Mean and P95 normalised latency and mean TTFT over load, a line per policy, averaged over repeats."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    panels: tuple[tuple[str, Value], ...] = (
        ("mean normalised latency (s/token)", lambda row: row.mean_normalised_s),
        ("P95 normalised latency (s/token)", lambda row: row.p95_normalised_s),
        ("mean time to first token (s)", lambda row: row.mean_ttft_s),
    )
    for axes, (label, value) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for policy in dict.fromkeys(row.policy for row in rows):
            loads = sorted({row.load for row in rows if row.policy == policy})
            means = [stats.mean([value(r) for r in rows if (r.policy, r.load) == (policy, load)]) for load in loads]
            axes.plot([100 * load for load in loads], means, marker="o", label=policy)
        axes.set(xlabel="load (% of capacity)", ylabel=label, yscale="log")
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)
