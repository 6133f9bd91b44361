"""The orders that studies compare, by name."""

from dataclasses import replace

from .case import NEVER_S, Case

PAPER = Case(alpha_s=0.3)
DEFAULT_MLFQ = Case()

ORDERS: dict[str, Case] = {
    "fcfs": Case(policy="fcfs"),
    "round robin": Case(policy="round-robin"),
    "paper": PAPER,
    "alpha 10 s": DEFAULT_MLFQ,
    "no promotion": Case(alpha_s=NEVER_S),
    "0.3 s, return": Case(alpha_s=0.3, promotion="return"),
    "10 s, return": Case(promotion="return"),
    "naive, 0.3 s": Case(policy="naive-mlfq", alpha_s=0.3),
    "naive, 10 s": Case(policy="naive-mlfq"),
    "las": Case(policy="las"),
    "slack": Case(policy="slack"),
    "predicted": Case(policy="predicted"),
    "hints 0.7": Case(policy="predicted", hint_error=0.7),
    "hints 1.2": Case(policy="predicted", hint_error=1.2),
    "srpt": Case(policy="srpt"),
}
"""`paper`: skip-join MLFQ with alpha 0.3 s. `hints`: callers guess the answer's length, off by exp(N(0, x))."""


def under(order: str, base: Case) -> Case:
    """`base` with the order's policy and parameters."""
    chosen = ORDERS[order]
    return replace(
        base,
        policy=chosen.policy,
        alpha_s=chosen.alpha_s,
        promotion=chosen.promotion,
        overrun=chosen.overrun,
        hint_error=chosen.hint_error,
    )
