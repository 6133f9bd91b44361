"""Replicas in one heap: lazily fed, deterministic, equal to the plain simulator, and flat in memory."""

import gc
import itertools
import json
import tracemalloc
from collections import Counter
from collections.abc import Iterator

import pytest

from fastserve_scheduler.core.history import History
from fastserve_scheduler.core.scheduler import SchedulerCore
from fastserve_scheduler.sim import Simulator
from fastserve_scheduler.sim.arrivals import Request, constant, fixed_lengths, independent
from fastserve_scheduler.sim.fleet import Fleet, Outcome, to_event
from fastserve_scheduler.sim.replica import Control
from fastserve_scheduler.sim.report import Setup, to_result
from fastserve_scheduler.sim.router import ROUTERS

from .support import MS, plant

LENGTHS = fixed_lengths(8, 6)


def requests(count: int, rate: float = 200.0, seed: int = 1) -> Iterator[Request]:
    def draw(rng: object) -> tuple[int, int]:
        return rng.randrange(1, 60), rng.randrange(1, 40)  # type: ignore[attr-defined]  # a random.Random

    return itertools.islice(independent(constant(rate), draw, seed), count)


def run(count: int, seed: int = 1, **options: object) -> Outcome:
    return Fleet(plant(**options), check=True).run(requests(count, seed=seed))  # type: ignore[arg-type]  # as plant's


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("num_blocks", [40, 256])
def test_it_says_the_same_as_the_simulator_that_keeps_everything(num_stages: int, num_blocks: int) -> None:
    system = plant(num_blocks, host_slots=128, num_stages=num_stages)
    fleet = Fleet(system).run(requests(60))
    simulator = Simulator(SchedulerCore(system.config, system.profile), system.cost, link=system.link)
    arrivals = [(r.at_ns, to_event(number, r)) for number, r in enumerate(requests(60), 1)]
    plain = simulator.run(arrivals, system.num_blocks, host_slots=system.host_slots)
    rows = fleet.recorder.finished
    assert len(rows) == 60
    assert fleet.end_ns == plain.end_ns
    for row, number in enumerate(rows.number):
        job = plain.jobs[number + 1]
        assert (rows.first[row], rows.finished[row]) == (job.first_token_ns, job.finished_ns)
        assert (rows.output[row], rows.iterations[row]) == (job.output_tokens, job.iterations)
        assert rows.longest_waits_s()[row] == job.max_gap_ns / 1e9


def test_equal_seeds_give_equal_bytes_and_others_do_not() -> None:
    def text(seed: int) -> str:
        return json.dumps(to_result(Setup("m", 200.0, detailed=True), run(50, seed, num_blocks=40, host_slots=64)))

    assert text(1) == text(1)
    assert text(1) != text(2)


def test_memory_grows_by_a_small_row_per_request_and_by_nothing_per_token(monkeypatch: pytest.MonkeyPatch) -> None:
    # The core remembers its last 65,536 moments; here few, so that short runs fill the ring.
    monkeypatch.setattr(History.__init__, "__defaults__", (64,))

    def grown(count: int) -> int:
        gc.collect()
        tracemalloc.start()
        outcome = Fleet(plant()).run(itertools.islice(independent(constant(50.0), LENGTHS, 1), count))
        gc.collect()
        bytes_now = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert len(outcome.recorder.finished) == count
        return bytes_now

    short, long = grown(100), grown(400)
    assert (long - short) / 300 < 250


def test_arrivals_are_drawn_when_their_time_has_come() -> None:
    drawn: list[int] = []

    def lazily() -> Iterator[Request]:
        for number in range(1000):
            drawn.append(number)
            yield Request(number * 1000 * MS, 8, 4)

    Fleet(plant()).run(lazily(), until_ns=10_500 * MS)
    assert len(drawn) == 12


def test_arrivals_out_of_order_are_a_mistake_of_whoever_made_them() -> None:
    with pytest.raises(ValueError, match="in order of time"):
        Fleet(plant()).run([Request(5, 1, 1), Request(4, 1, 1)])


def test_a_model_that_stops_early_ends_there() -> None:
    outcome = Fleet(plant(), check=True).run([Request(0, 8, 3, max_output_tokens=50), Request(0, 8, 5)])
    assert sorted(outcome.recorder.finished.output) == [3, 5]
    assert not outcome.replicas[0].stops


def test_what_is_refused_counts_as_failed() -> None:
    outcome = Fleet(plant(max_waiting_jobs=1)).run([Request(0, 8, 3) for _ in range(10)])
    result = to_result(Setup("m", 1.0), outcome)
    assert result["failed"] == outcome.recorder.rejected == 10 - len(outcome.recorder.finished)
    assert outcome.recorder.rejected > 0


@pytest.mark.parametrize("router", ROUTERS)
def test_every_router_uses_every_replica(router: str) -> None:
    outcome = Fleet(plant(), num_replicas=3, router=ROUTERS[router](1), check=True).run(requests(90, rate=2000.0))
    counts = Counter(outcome.recorder.finished.replica)
    assert len(outcome.recorder.finished) == 90
    assert min(counts[index] for index in range(3)) >= 15


def test_the_least_loaded_avoids_the_replica_that_is_busy_with_a_long_prompt() -> None:
    arrivals = [Request(0, 120, 1), Request(0, 120, 1), *(Request(1, 100, 1) for _ in range(3)), Request(2, 1, 1)]
    outcome = Fleet(plant(), num_replicas=2, router=ROUTERS["least-loaded"](0)).run(arrivals)
    rows = outcome.recorder.finished
    by_number = dict(zip(rows.number, rows.replica, strict=True))
    assert {by_number[0], by_number[1]} == {0, 1}
    assert by_number[5] == 1


def test_replicas_share_the_load() -> None:
    one = Fleet(plant()).run(requests(100, rate=1000.0)).end_ns
    four = Fleet(plant(), num_replicas=4).run(requests(100, rate=1000.0)).end_ns
    assert four < 0.5 * one


def test_control_costs_delay_results_and_are_not_computing() -> None:
    system = plant()
    slow = plant()
    control = Control(turn_ns=5 * MS, turn_job_ns=MS)
    slow = type(slow)(slow.config, slow.profile, slow.cost, slow.num_blocks, control=control)
    plain, delayed = (Fleet(s).run([Request(0, 8, 10), Request(0, 8, 10)]) for s in (system, slow))
    # The second one is in all but the first of eleven iterations, the first in all but the last.
    assert delayed.end_ns - plain.end_ns == 11 * 5 * MS + 20 * MS
    assert delayed.replicas[0].busy_ns == plain.replicas[0].busy_ns


def test_hops_are_paid_between_stages_only() -> None:
    system = plant(num_stages=3)
    slow = type(system)(system.config, system.profile, system.cost, system.num_blocks, control=Control(hop_ns=MS))
    plain, delayed = (Fleet(s).run([Request(0, 8, 1)]) for s in (system, slow))
    assert delayed.end_ns - plain.end_ns == 2 * MS
