"""Tables and values of named cases."""

from collections.abc import Mapping

from .case import Case
from .shared import Table
from .study import Rows, cell

DIGITS = {
    "mean": 4, "p95": 4, "p99": 4, "jct": 1, "jct99": 1, "ttft": 2, "wait": 1, "blocked": 4, "recomputed": 2,
    "gb_out": 0, "gb_in": 0, "peak_kv": 0, "enst_error_s": 1, "itl99": 4, "recovery": 0, "peak_live": 0, "capacity": 2,
    "longest_quarter": 4, "promotions": 0,
}  # fmt: skip
"""Decimals of each number."""

TITLES = {
    "mean": "mean, s/token", "p95": "P95", "p99": "P99", "jct": "completion, s", "jct99": "its P99",
    "ttft": "first token, s", "wait": "longest wait, s", "blocked": "blocked on swaps", "recomputed": "computed again",
    "gb_out": "GB out", "gb_in": "GB in", "peak_kv": "peak KV, tokens", "enst_error_s": "ENST error, s",
    "itl99": "token gap P99, s", "recovery": "recovery, s", "peak_live": "most at once", "capacity": "job/s",
    "longest_quarter": "longest quarter",
}  # fmt: skip

RATIO_DIGITS = 2

#: Cases by the name of their row.
Cases = Mapping[str, Case]


def sheet(
    rows: Rows,
    title: str,
    cases: Cases,
    columns: tuple[str, ...],
    base: str = "",
    against: tuple[str, ...] = ("mean", "p95"),
) -> Table:
    """A row per case with the seeds it has; with `base`, the name of a row, also `against` as paired ratios to it."""
    against = against if base else ()
    body = []
    for name, case in cases.items():
        cells = [cell(rows.of(case, column), DIGITS[column]) for column in columns]
        ratios = [_against(rows, case, cases[base], column) for column in against]
        body.append([f"{name} ({len(rows.each(case))})", *cells, *ratios])
    titles = [TITLES.get(column, column) for column in columns]
    over = [f"{TITLES[column].split(',')[0]} / {base}" for column in against]
    return Table(title, ["(seeds)", *titles, *over], body)


def _against(rows: Rows, case: Case, base: Case, column: str) -> str:
    return "1" if case == base else cell(rows.ratios(case, base, column), RATIO_DIGITS)


def values(rows: Rows, cases: Cases, columns: tuple[str, ...]) -> dict[str, object]:
    """By row and column, one number per seed."""
    return {name: {column: rows.of(case, column) for column in columns} for name, case in cases.items()}
