"""Bursts: 70 % of the capacity, 2 or 3 times as much for 10 s, and 70 % again."""

import sys

from .case import Case
from .study import Options, Report, Rows, Study, main
from .surges import CAPACITY, cases_of, report, surge

USUAL = 0.7 * CAPACITY
SURGES = {f"{factor}x for 10 s": surge(USUAL, factor * USUAL, 60, 10, 260) for factor in (2, 3)}


def cases(options: Options) -> list[Case]:
    return list(cases_of(SURGES).values())


def burst_report(rows: Rows) -> Report:
    return report(rows, SURGES)


STUDY = Study("bursts", cases, burst_report)

if __name__ == "__main__":
    sys.exit(main(STUDY))
