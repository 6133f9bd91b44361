"""Rows, table and picture of swapping.py."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from _metrics import Metrics, total
from matplotlib.figure import Figure

from fastserve.bench.metrics import Outcome
from fastserve.bench.runner import Measured
from fastserve_common.load import stats

BASELINE = "proactive"


@dataclass(frozen=True, slots=True)
class Row:
    """One run of one KV policy at one load.

    `blocked_share`, `roomless_share`: of all requests' latency; `stalled_share`: of the run. `working_set`: the most
    tokens that begun requests had at once, over the pool's.
    """

    kv_policy: str
    load: float
    offered_rps: float
    completed: int
    failed: int
    duration_s: float
    mean_normalised_s: float
    p95_normalised_s: float
    mean_ttft_s: float
    output_tokens_per_s: float
    blocked_share: float
    roomless_share: float
    stalled_share: float
    bytes_out: float
    bytes_in: float
    copy_s: float
    recomputed_share: float
    preemptions: float
    working_set: float

    @classmethod
    def of(cls, kv_policy: str, load: float, offered_rps: float, measured: Measured, got: Metrics, pool: int) -> Self:
        """`got`: how far each counter went during the run."""
        run = measured.run
        normalised_s = run.normalised_s()
        latency_s = sum(o.latency_s for o in run.completed) or 1.0
        tokens = sum(o.input_tokens + o.output_tokens for o in run.completed) or 1
        return cls(
            kv_policy=kv_policy,
            load=load,
            offered_rps=offered_rps,
            completed=len(run.completed),
            failed=run.failed,
            duration_s=run.duration_s,
            mean_normalised_s=stats.mean(normalised_s),
            p95_normalised_s=stats.percentile(normalised_s, 95),
            mean_ttft_s=stats.mean(run.samples_s("ttft")),
            output_tokens_per_s=run.per_second(run.output_tokens),
            blocked_share=total(got, "fastserve:swap_blocked_seconds_total") / latency_s,
            roomless_share=total(got, "fastserve:swap_roomless_seconds_total") / latency_s,
            stalled_share=total(got, "fastserve:swap_stalled_seconds_total") / run.duration_s,
            bytes_out=total(got, "fastserve:swap_bytes_total", 'direction="out"'),
            bytes_in=total(got, "fastserve:swap_bytes_total", 'direction="in"'),
            copy_s=total(got, "fastserve:swap_copy_seconds_total"),
            recomputed_share=total(got, "fastserve:recomputed_tokens_total") / tokens,
            preemptions=total(got, "fastserve:num_preemptions_total"),
            working_set=most_tokens(run.completed) / pool,
        )

    def sentence(self) -> str:
        return (
            f"{self.kv_policy} at {self.load:.0%} ({self.completed} of {self.completed + self.failed} requests, "
            f"{self.duration_s:.0f} s): mean {self.mean_normalised_s:.3f} P95 {self.p95_normalised_s:.3f} s/token, "
            f"{self.output_tokens_per_s:.1f} tokens/s, working set {self.working_set:.1f} pools, "
            f"blocked {self.blocked_share:.2%}"
        )


def most_tokens(outcomes: Sequence[Outcome]) -> float:
    """The most tokens of prompt and answer that begun, unfinished requests had at one time: the KV they want kept."""
    steps: list[tuple[float, float]] = []
    for outcome in outcomes:
        arrived = outcome.token_arrivals()
        if not arrived:
            continue
        steps.append((arrived[0][0], outcome.input_tokens))
        steps += [(time_s, tokens) for time_s, tokens in arrived]
        steps.append((outcome.end_s, -outcome.input_tokens - sum(tokens for _, tokens in arrived)))
    most = now = 0.0
    for _, change in sorted(steps):
        now += change
        most = max(most, now)
    return most


def table(rows: Sequence[Row]) -> str:
    """Markdown; ratios are to the baseline at the same load, above 1 is worse."""
    base = {row.load: row.mean_normalised_s for row in rows if row.kv_policy == BASELINE}
    head = (
        f"load|KV policy|requests|run (s)|mean (s/token)|mean / {BASELINE}|P95|TTFT mean (s)|tokens/s"
        "|working set (pools)|blocked|no room|device stalled|MB out|MB in|copying (s)|computed again"
    ).split("|")
    lines = ["| " + " | ".join(head) + " |", "|---:|---|" + "---:|" * (len(head) - 2)]
    for row in sorted(rows, key=lambda row: row.load):
        ratio = f"{row.mean_normalised_s / base[row.load]:.2f}" if base.get(row.load) else "-"
        cells = [
            f"{row.load:.0%}", row.kv_policy, f"{row.completed}", f"{row.duration_s:.0f}",
            f"{row.mean_normalised_s:.3f}", ratio, f"{row.p95_normalised_s:.3f}", f"{row.mean_ttft_s:.2f}",
            f"{row.output_tokens_per_s:.1f}", f"{row.working_set:.1f}", f"{row.blocked_share:.2%}",
            f"{row.roomless_share:.1%}", f"{row.stalled_share:.2%}", f"{row.bytes_out / 1e6:.0f}",
            f"{row.bytes_in / 1e6:.0f}", f"{row.copy_s:.2f}", f"{row.recomputed_share:.2f}",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def save_plot(rows: Sequence[Row], path: Path) -> None:
    """Mean and P95 latency and throughput over load, a line per policy."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    panels: tuple[tuple[str, Callable[[Row], float]], ...] = (
        ("mean latency (s/token)", lambda row: row.mean_normalised_s),
        ("P95 latency (s/token)", lambda row: row.p95_normalised_s),
        ("output tokens/s", lambda row: row.output_tokens_per_s),
    )
    for axes, (label, value) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for policy in dict.fromkeys(row.kv_policy for row in rows):
            own = sorted((row for row in rows if row.kv_policy == policy), key=lambda row: row.load)
            axes.plot([100 * row.load for row in own], [value(row) for row in own], marker="o", label=policy)
        axes.set(xlabel="load (% of capacity)", ylabel=label, ylim=(0, None))
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)
