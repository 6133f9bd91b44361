"""Sustained overload: half of the capacity, 1.2, 1.5 or 2 times the capacity for a minute, and half again."""

import sys

from .case import Case
from .study import Options, Report, Rows, Study, main
from .surges import CAPACITY, cases_of, report, surge

USUAL = 0.5 * CAPACITY
SURGES = {
    f"{load:g}x for 60 s": surge(USUAL, load * CAPACITY, 60, 60, jobs)
    for load, jobs in ((1.2, 300), (1.5, 350), (2.0, 420))
}


def cases(options: Options) -> list[Case]:
    return list(cases_of(SURGES).values())


def overload_report(rows: Rows) -> Report:
    return report(rows, SURGES)


STUDY = Study("overload", cases, overload_report)

if __name__ == "__main__":
    sys.exit(main(STUDY))
