"""Plans in flight: what is sent when, what counts as an answer, and who is to blame for a broken stage."""

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastserve_scheduler.core.commands import PlanItem, RunIteration
from fastserve_scheduler.core.events import IterationDone
from fastserve_scheduler.flights import Flights, Part
from fastserve_scheduler.messages import Report

MAX_FAULTS = 2


def item(job_id: int, start: int = 0, num_tokens: int = 4, *, sample: bool = True) -> PlanItem:
    return PlanItem(job_id, start, num_tokens, sample, 0, (0,))


def plan(seq: int, *jobs: int, start: int = 0) -> RunIteration:
    return RunIteration(seq, 0, tuple(item(job, start) for job in jobs))


def report(part: Part, stage: int = 0, ids: int | None = None) -> Report:
    return Report(part.seq, 1, stage, 1, 10, array("I", range(part.num_samples if ids is None else ids)))


def land(flights: Flights, part: Part) -> IterationDone | None:
    assert flights.answered(report(part)) is part
    return flights.landed(part, 10, ())


def jobs_of(parts: list[Part]) -> list[tuple[int, ...]]:
    return [tuple(item.job_id for item in part.items) for part in parts]


def test_a_plan_travels_whole_and_is_done_once() -> None:
    flights = Flights(1, MAX_FAULTS)
    flights.add(plan(7, 1, 2))
    [part] = flights.departures()
    assert flights.departures() == []
    done = flights.landed(part, 10, (2,)) if flights.answered(report(part)) else None
    assert done == IterationDone(7, 0, 10, (2,))
    assert flights.answered(report(part)) is None, "a report that comes twice"
    assert len(flights) == 0


def test_only_the_last_stage_completes_a_part_and_the_silent_one_is_known() -> None:
    flights = Flights(3, MAX_FAULTS)
    flights.add(plan(0, 1))
    [part] = flights.departures()
    assert flights.silent_stage() == 0
    assert flights.answered(report(part, 0, 0)) is None
    assert flights.silent_stage() == 1
    assert flights.answered(report(part, 1, 0)) is None
    assert flights.silent_stage() == 2
    assert flights.answered(report(part, 2)) is part


@pytest.mark.parametrize("ids", [0, 1, 3])
def test_a_report_that_does_not_fit_its_plan_is_an_error(ids: int) -> None:
    flights = Flights(1, MAX_FAULTS)
    flights.add(plan(0, 1, 2))
    [part] = flights.departures()
    with pytest.raises(ValueError, match="2 sampled items"):
        flights.answered(report(part, ids=ids))


def test_suspects_fly_alone_after_the_others_and_in_turn() -> None:
    flights = Flights(2, MAX_FAULTS)
    flights.add(plan(0, 1, 2))
    flights.departures()
    assert flights.broken(None) == ()
    flights.add(plan(1, 1, 2, 3))
    flights.add(plan(2, 4))
    order = []
    while parts := flights.departures():
        order.append(jobs_of(parts))
        done = [flights.landed(part, 5, ()) for part in parts]
    assert order == [[(3,)], [(1,)], [(2,)], [(4,)]]
    assert done == [IterationDone(2, 0, 5)]


def test_the_parts_of_a_plan_are_one_result() -> None:
    flights = Flights(1, MAX_FAULTS)
    flights.add(plan(0, 1, 2))
    flights.departures()
    flights.broken(None)
    flights.add(plan(1, 1, 2))
    [first] = flights.departures()
    assert flights.landed(first, 5, (1,)) is None
    [second] = flights.departures()
    assert flights.landed(second, 6, (2,)) == IterationDone(1, 0, 11, (1, 2))


def test_getting_past_the_place_clears_a_suspect_and_not_before() -> None:
    flights = Flights(1, MAX_FAULTS)
    flights.add(RunIteration(0, 0, (item(1, 0, 10), item(2, 0, 4))))
    flights.departures()
    flights.broken(None)
    flights.add(RunIteration(1, 0, (item(1, 0, 6, sample=False), item(2, 0, 4))))
    while parts := flights.departures():
        for part in parts:
            flights.landed(part, 1, ())
    flights.add(RunIteration(2, 0, (item(1, 6, 4), item(2, 4, 1))))
    assert jobs_of(flights.departures()) == [(2,)], "job 1 is still before the place"


def test_a_plan_of_one_job_that_dies_with_another_in_flight_convicts_nobody() -> None:
    flights = Flights(2, 1)
    flights.add(plan(0, 1))
    flights.add(plan(1, 2))
    assert len(flights.departures()) == 2
    assert flights.broken(None) == ()


def test_a_fault_on_another_plan_leaves_the_rest_unsuspected() -> None:
    flights = Flights(2, MAX_FAULTS)
    flights.add(plan(0, 1, 2))
    flights.add(plan(1, 3))
    first, _ = flights.departures()
    flights.broken(first.seq)
    flights.add(plan(2, 3, 4))
    assert jobs_of(flights.departures()) == [(3, 4)]


@settings(deadline=None)
@given(
    jobs=st.lists(st.integers(1, 12), min_size=1, max_size=12, unique=True),
    poison=st.sets(st.integers(1, 12), max_size=3),
    num_stages=st.integers(1, 3),
    named=st.booleans(),
)
def test_the_guilty_are_found_and_nobody_else(jobs: list[int], poison: set[int], num_stages: int, named: bool) -> None:
    """Whatever part carries a guilty job breaks the stages; the plan is then tried again without the convicted."""
    flights = Flights(num_stages, MAX_FAULTS)
    alive, finished, breaks = list(jobs), set[int](), 0
    while todo := [job for job in alive if job not in finished]:
        flights.add(plan(breaks, *todo))
        while parts := flights.departures():
            [part] = parts
            guilty = poison.intersection(item.job_id for item in part.items)
            if guilty:
                breaks += 1
                for job in flights.broken(part.seq if named else None):
                    assert job in poison
                    alive.remove(job)
                    flights.forget(job)
                break
            finished.update(item.job_id for item in part.items)
            flights.landed(part, 1, ())
        assert breaks <= 1 + MAX_FAULTS * len(poison)
    assert finished == set(jobs) - poison
