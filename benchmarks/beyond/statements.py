"""What independent simulations of the same scheduler found, with the serving core: the numbers of docs/findings.md.

Each part of `PARTS` asks for the runs of one statement, and `--only` chooses among them.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace

from .case import A100_40_TOKENS, Case
from .orders import under
from .shared import Table, crossing
from .sheets import sheet
from .study import Options, Report, Rows, Study, cell, main, numbers

SLO_S = 0.3
COLUMNS = ("mean", "p95", "p99", "jct", "jct99", "ttft", "wait")

#: Cases by name.
Cases = dict[str, Case]


def at(rate: float, orders: Sequence[str], base: Case | None = None) -> Cases:
    return {f"{order} @ {rate:g}": under(order, replace(base or Case(), rate=rate)) for order in orders}


FCFS_RATES = (1.25, 1.75, 2.0, 2.25, 2.5, 3.0)
PAPER_RATES = (3.0, 4.0, 5.0)
SHORT = Case(kv_tokens=A100_40_TOKENS, host_tokens=1 << 17)
CODE, CONV, ALPACA = Case(load="azure-code"), Case(load="azure-conv"), Case(load="alpaca")
LARGE = Case(batch=128, kv_tokens=55_000)
STABLE = Case(jobs=1200, window=True)

COMPARED = (
    "fcfs", "paper", "10 s, return", "alpha 10 s", "no promotion", "0.3 s, return", "hints 0.7", "srpt", "round robin",
    "slack", "hints 1.2", "las", "naive, 0.3 s", "naive, 10 s", "predicted",
)  # fmt: skip


def named(prefix: str, cases: Cases) -> Cases:
    return {f"{prefix}: {name}": case for name, case in cases.items()}


PARTS: dict[str, Cases] = {
    "capacity": {"fcfs, all at once": Case(policy="fcfs")},
    "fcfs": {name: case for rate in FCFS_RATES for name, case in at(rate, ["fcfs"]).items()},
    "orders": at(3.0, COMPARED),
    "orders2": at(
        2.0, ("fcfs", "round robin", "paper", "alpha 10 s", "no promotion", "0.3 s, return", "slack", "srpt")
    ),
    "paper": {name: case for rate in PAPER_RATES for name, case in at(rate, ("paper", "alpha 10 s")).items()},
    "promoted": {
        f"paper @ {rate:g}": replace(under("paper", Case(rate=rate)), watch=True) for rate in (1.5, 1.7, 1.9, 3.0)
    },
    "memory": {
        **{
            f"10 s, {kv}": replace(SHORT, rate=3.0, kv=kv)
            for kv in ("proactive", "reactive", "blocking", "recompute", "defer")
        },
        "10 s, defer, true limits": replace(SHORT, rate=3.0, kv="defer", limits=True),
        "10 s, proactive by ENST": replace(SHORT, rate=3.0, kv_ranking="enst"),
        "never, proactive": replace(under("no promotion", SHORT), rate=3.0),
        "0.3 s, proactive": replace(under("paper", SHORT), rate=3.0),
        "0.3 s, reactive": replace(under("paper", SHORT), rate=3.0, kv="reactive"),
    },
    "skip-join": {
        **named("alpaca", at(14.0, ("naive, 0.3 s", "paper", "naive, 10 s", "alpha 10 s"), ALPACA)),
        **named(
            "in/out 256",
            at(12.0, ("fcfs", "naive, 0.3 s", "paper", "naive, 10 s", "alpha 10 s"), Case(load="ratio:256")),
        ),
        **named("azure conv", at(2.5, ("naive, 0.3 s", "paper", "naive, 10 s", "alpha 10 s"), CONV)),
    },
    "azure code": named("azure code", at(2.0, ("fcfs", "paper", "alpha 10 s", "predicted", "hints 0.7", "srpt"), CODE)),
    "large": named("B=128", {**at(6.0, ("fcfs", "paper", "srpt"), LARGE), **at(8.0, ("fcfs", "paper", "srpt"), LARGE)}),
    "transient": {
        f"{order} @ 4, {jobs} jobs": replace(under(order, Case(rate=4.0)), jobs=jobs)
        for order in ("fcfs", "paper")
        for jobs in (100, 200, 400, 800)
    },
    "stable": at(1.7, ("fcfs", "paper", "alpha 10 s"), STABLE),
    "held out": named("alpaca", at(14.0, ("fcfs", "slack", "predicted", "hints 0.7", "srpt"), ALPACA)),
}


def rank_correlation(left: Sequence[float], right: Sequence[float]) -> float:
    """Spearman's; ties are broken by place, of which there are next to none."""
    count = len(left)
    squares = sum((a - b) * (a - b) for a, b in zip(_ranks(left), _ranks(right), strict=True))
    return 1 - 6 * squares / (count * (count * count - 1))


def _ranks(values: Sequence[float]) -> list[int]:
    ranks = [0] * len(values)
    for rank, index in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        ranks[index] = rank
    return ranks


def report(rows: Rows) -> Report:
    tables = [
        sheet(rows, name, cases, (*COLUMNS, "peak_kv", "gb_in", "capacity"), next(iter(cases)), ("mean", "p95", "jct"))
        for name, cases in PARTS.items()
    ]
    values: dict[str, object] = {
        part: {
            name: {column: rows.of(case, column) for column in (*COLUMNS, "peak_kv", "gb_in", "longest_quarter")}
            for name, case in cases.items()
        }
        for part, cases in PARTS.items()
    }
    values["rate at SLO"] = found = {
        "fcfs, mean": _crossings(rows, "fcfs", FCFS_RATES, "mean"),
        "fcfs, p95": _crossings(rows, "fcfs", FCFS_RATES, "p95"),
        "paper, p95": _crossings(rows, "paper", PAPER_RATES, "p95"),
        "alpha 10 s, p95": _crossings(rows, "alpha 10 s", PAPER_RATES, "p95"),
    }
    values["rank correlation with the paper's order"] = likeness = {
        f"{order} @ {rate:g}": _likeness(rows, order, rate)
        for rate in (2.0, 3.0)
        for order in ("round robin", "no promotion", "alpha 10 s")
    }
    values["promoted"] = promoted = {name: rows.of(case, "promoted") for name, case in PARTS["promoted"].items()}
    for title, by_name in (
        (f"Rate at which {SLO_S} s/token is reached, job/s", found),
        ("Rank correlation of per-job latency with the paper's order", likeness),
        ("Share of slots that went to jobs above their own queue", promoted),
    ):
        tables.append(Table(title, ["", ""], [[name, cell(by_seed, 3)] for name, by_seed in by_name.items()]))
    return Report(tables, values)


def _crossings(rows: Rows, order: str, rates: Sequence[float], metric: str) -> list[float]:
    """By seed; those beyond the rates count as the largest."""
    by_rate = [rows.of(under(order, Case(rate=rate)), metric) for rate in rates]
    return [min(crossing(rates, list(ys), SLO_S), rates[-1]) for ys in zip(*by_rate, strict=False)]


def _likeness(rows: Rows, order: str, rate: float) -> list[float]:
    pairs = zip(rows.each(under(order, Case(rate=rate))), rows.each(under("paper", Case(rate=rate))), strict=False)
    return [rank_correlation(numbers(mine, "each"), numbers(papers, "each")) for mine, papers in pairs]


def cases(options: Options) -> list[Case]:
    chosen = options.only or tuple(PARTS)
    return [
        case
        for part in chosen
        for case in PARTS[part].values()
        if options.traces is not None or not case.load.startswith("azure")
    ]


STUDY = Study("statements", cases, report)

if __name__ == "__main__":
    sys.exit(main(STUDY))
