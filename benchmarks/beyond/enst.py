"""How wrong the estimated next scheduled time is, and what that costs: swapped KV ranked by ENST against ranked by the
plain order, with the true decode times and with half and twice of them. OPT-13B, KV memory of an A100-40, 3 job/s."""

import sys
from dataclasses import replace

from .case import A100_40_TOKENS, Case
from .orders import under
from .sheets import sheet, values
from .study import Options, Report, Rows, Study, main

SHORT = Case(kv_tokens=A100_40_TOKENS, host_tokens=1 << 17, rate=3.0)
COLUMNS = ("mean", "p95", "jct", "ttft", "wait", "blocked", "gb_out", "gb_in", "enst_error_s")
BASES = {"alpha 10 s": SHORT, "paper": under("paper", SHORT)}


def at(order: str) -> dict[str, Case]:
    base = BASES[order]
    found = {"order": base, "ENST": replace(base, kv_ranking="enst")}
    if order == "alpha 10 s":
        found |= {f"ENST, decodes x {x:g}": replace(base, kv_ranking="enst", decode_factor=x) for x in (0.5, 2.0)}
    return found


def cases(options: Options) -> list[Case]:
    return [case for order in BASES for case in at(order).values()]


def report(rows: Rows) -> Report:
    tables = [sheet(rows, order, at(order), COLUMNS, "order", ("mean", "p95", "gb_in")) for order in BASES]
    return Report(tables, {order: values(rows, at(order), COLUMNS) for order in BASES})


STUDY = Study("enst", cases, report)

if __name__ == "__main__":
    sys.exit(main(STUDY))
