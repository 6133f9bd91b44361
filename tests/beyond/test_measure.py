"""What the studies compute of a run."""

import importlib
from dataclasses import replace

import pytest

from fastserve_scheduler.sim.recorder import Finished

S = 1_000_000_000

_case, _measure, _orders, _statements = (
    importlib.import_module(f"benchmarks.beyond.{name}") for name in ("case", "measure", "orders", "statements")
)
A100_40_TOKENS, Case, link_bytes_per_s = _case.A100_40_TOKENS, _case.Case, _case.link_bytes_per_s
plant_of, requests_of, under = _case.plant_of, _case.requests_of, _orders.under
CLASSES, measure, recovery = _measure.CLASSES, _measure.measure, _measure.recovery
rank_correlation = _statements.rank_correlation


def test_equal_cases_are_equal_runs_and_seeds_differ() -> None:
    case = Case(load="alpaca", rate=14.0, jobs=40)
    assert measure(case) == measure(case)
    assert measure(case)["mean"] != measure(replace(case, seed=2))["mean"]


def test_orders_get_the_same_requests() -> None:
    case = Case(load="alpaca", rate=14.0, jobs=40)
    plain = [(request.at_ns, request.prompt_tokens, request.output_tokens) for request in requests_of(case, None)]
    hinted = requests_of(under("hints 0.7", case), None)
    assert [(request.at_ns, request.prompt_tokens, request.output_tokens) for request in hinted] == plain
    assert all(request.expected_output_tokens for request in hinted)


def test_a_key_names_what_differs_from_the_defaults() -> None:
    assert Case(rate=3.0, alpha_s=0.3).key() == '{"rate": 3.0, "alpha_s": 0.3}'


def test_only_what_the_scheduler_is_told_is_wrong() -> None:
    right, wrong = plant_of(Case()), plant_of(Case(prefill_factor=2.0, decode_factor=0.5))
    assert wrong.cost == right.cost
    assert wrong.profile.prefill_ns(1024) == pytest.approx(2 * right.profile.prefill_ns(1024), rel=1e-6)
    assert wrong.profile.min_decode_ns == pytest.approx(right.profile.min_decode_ns / 2, rel=1e-6)


def test_the_link_is_as_fast_as_the_ratio_says() -> None:
    assert link_bytes_per_s(0.4) == pytest.approx(25e9, rel=0.05)
    assert link_bytes_per_s(0.8) * 2 == pytest.approx(link_bytes_per_s(0.4), rel=1e-6)
    short = Case(kv_tokens=A100_40_TOKENS, swap_compute=4.0)
    assert plant_of(short).link.bytes_per_second == link_bytes_per_s(4.0)


def test_fewer_kv_heads_leave_room_for_more_tokens() -> None:
    blocks = [plant_of(Case(kv_heads=heads, batch=64)).num_blocks for heads in (32, 8, 1)]
    assert blocks[1] == pytest.approx(4 * blocks[0], rel=0.15)
    assert blocks[2] > 7 * blocks[1]


def test_a_trace_needs_its_folder() -> None:
    with pytest.raises(ValueError, match="needs --traces"):
        requests_of(Case(load="azure-code", rate=2.0), None)


def test_promotions_are_seen_with_a_short_alpha_alone() -> None:
    crowd = Case(load="alpaca", rate=25.0, jobs=200, watch=True)
    often, never = measure(replace(crowd, alpha_s=0.3))["promoted"], measure(under("no promotion", crowd))["promoted"]
    assert isinstance(often, float)
    assert often > 0.2
    assert never == 0


def test_watching_changes_nothing() -> None:
    case = Case(load="alpaca", rate=25.0, jobs=60, alpha_s=0.3)
    watched = measure(replace(case, watch=True))
    del watched["promoted"]
    assert watched == measure(case)


def test_longer_answers_wait_longer_under_feedback_queues_in_overload() -> None:
    row = measure(under("no promotion", Case(load="alpaca", rate=30.0, jobs=300)))
    means = row["class_mean"]
    assert isinstance(means, list)
    assert len(means) == len(CLASSES)
    assert means[0] < means[1]


def test_a_surge_has_a_recovery() -> None:
    row = measure(Case(load="alpaca", pattern=((20, 6.0), (5, 60.0), (1, 6.0)), rate=6.0, jobs=500))
    assert isinstance(row["recovery"], float)
    assert row["recovery"] > 1
    assert isinstance(row["peak_live"], float)
    assert row["peak_live"] > 100


def _finished(*rows: tuple[float, float]) -> Finished:
    finished = Finished()
    for begin_s, end_s in rows:
        finished.arrived.append(round(begin_s * S))
        finished.finished.append(round(end_s * S))
    return finished


def test_recovery_is_over_when_no_more_are_there_than_before() -> None:
    # One at a time before 10 s; three come at 10 and leave at 13, 15 and 21.
    finished = _finished((6, 8), (10, 13), (10, 15), (10, 21))
    assert recovery(finished, 10, 12) == (3.0, 3.0)


def test_rank_correlation() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 40]) == 1
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == -1
    assert rank_correlation([1, 2, 3, 4], [2, 1, 4, 3]) == pytest.approx(0.6)
