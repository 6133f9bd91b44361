"""Capacity is that of the load and not of the few requests that happened to be drawn."""

import random

import pytest

from fastserve_scheduler.sim.arrivals import at_once, constant, fixed_lengths, independent
from fastserve_scheduler.sim.capacity import DRAWN, capacity, completed_per_second, served_of
from fastserve_scheduler.sim.fleet import Fleet

from .support import COST, plant


def long_tailed(rng: random.Random) -> tuple[int, int]:
    """One answer of ten is twenty times as long as the others: 11.6 tokens on average."""
    return 8, 80 if rng.random() < 0.1 else 4


def test_draws_of_few_requests_agree() -> None:
    system, saturated, corrected = plant(policy="fcfs", max_waiting_jobs=1000), [], []
    usual = [long_tailed(random.Random(seed)) for seed in range(DRAWN)]
    for seed in range(8):
        finished = Fleet(system).run(at_once(300, long_tailed, seed)).recorder.finished
        saturated.append(completed_per_second(finished))
        corrected.append(served_of(system, finished, usual))
    assert max(corrected) < 1.2 * min(corrected)
    assert max(saturated) > 1.5 * min(saturated), "the plain rate depends on the draw: else there is nothing to mend"


def test_of_equal_requests_it_is_what_full_iterations_give() -> None:
    """Four a batch, 8 tokens in and 40 out: a prompt, and 39 decodes in company."""
    served = capacity(plant(), fixed_lengths(8, 40), seed=1)
    decode_ns = COST.decode_fixed_ns + 4 * (COST.decode_job_ns + COST.decode_context_ns * 28)
    assert served == pytest.approx(4 / (40 * decode_ns / 1e9), rel=0.12)


def test_a_queue_grows_beyond_it_and_not_below() -> None:
    system = plant(policy="fcfs", max_waiting_jobs=1000)
    served = capacity(system, long_tailed, seed=1)

    def longest_wait_s(load: float) -> float:
        requests = [r for _, r in zip(range(600), independent(constant(load * served), long_tailed, 3), strict=False)]
        finished = Fleet(system).run(requests).recorder.finished
        return max(finished.first_s()[-100:])

    assert longest_wait_s(1.3) > 5 * longest_wait_s(0.7)


def test_requests_that_do_not_fit_have_no_capacity() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        capacity(plant(num_blocks=4), fixed_lengths(100, 20), seed=1)


def test_what_requests_take_on_average_is_known_well() -> None:
    rng = random.Random(0)
    drawn = [long_tailed(rng)[1] for _ in range(DRAWN)]
    assert sum(drawn) / DRAWN == pytest.approx(11.6, rel=0.03)
