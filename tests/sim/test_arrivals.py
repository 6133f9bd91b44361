"""Workloads: rates and burstiness are what was asked for, requests do not depend on who serves them."""

import gzip
import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest

from fastserve_common.load import stats
from fastserve_common.load.lengths import SHAREGPT
from fastserve_common.load.traces import TraceError
from fastserve_scheduler.sim import arrivals
from fastserve_scheduler.sim.arrivals import Rates, Request, Trace, fixed_lengths
from fastserve_scheduler.sim.callers import Callers
from fastserve_scheduler.sim.fleet import Fleet
from fastserve_scheduler.sim.programs import Programs

from .support import plant

LENGTHS = fixed_lengths(5, 7)
S = 1_000_000_000


def times_s(rates: Rates, count: int, burstiness: float = 1.0) -> list[float]:
    found = itertools.islice(arrivals.independent(rates, LENGTHS, 3, burstiness), count)
    return [request.at_ns / S for request in found]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0, math.inf])
def test_gaps_have_the_mean_and_the_variation_that_were_asked_for(burstiness: float) -> None:
    found = times_s(arrivals.constant(20.0), 20_000, burstiness)
    gaps = [later - earlier for earlier, later in itertools.pairwise([0.0, *found])]
    assert stats.mean(gaps) == pytest.approx(1 / 20, rel=0.04)
    expected = 0.0 if math.isinf(burstiness) else 1 / math.sqrt(burstiness)
    assert stats.std(gaps) / stats.mean(gaps) == pytest.approx(expected, abs=0.06)


def test_another_rate_is_the_same_requests_faster() -> None:
    draw = arrivals.lengths_of(SHAREGPT, 512, 1024)
    slow, fast = (
        list(itertools.islice(arrivals.independent(arrivals.constant(rate), draw, 7), 50)) for rate in (1.0, 4.0)
    )
    assert [r.prompt_tokens for r in slow] == [r.prompt_tokens for r in fast]
    assert [r.at_ns / 4 for r in slow] == pytest.approx([r.at_ns for r in fast], abs=1)
    assert all(r.prompt_tokens <= 512 and r.prompt_tokens + r.output_tokens <= 1024 for r in slow)


def test_a_burst_is_as_much_faster_as_it_says() -> None:
    found = times_s(arrivals.bursts(50.0, 3.0, burst_s=10.0, every_s=60.0), 20_000)
    inside = sum(50 <= at_s % 60 < 60 for at_s in found) / 10
    outside = sum(at_s % 60 < 50 for at_s in found) / 50
    assert inside / outside == pytest.approx(3.0, rel=0.05)


def test_a_day_has_its_mean_and_its_swing() -> None:
    rates = arrivals.diurnal(10.0, 0.8, period_s=100.0)
    assert rates.mean == pytest.approx(10.0)
    found = times_s(rates, 20_000)
    assert len(found) / found[-1] == pytest.approx(10.0, rel=0.03)
    noon = sum(45 <= at_s % 100 < 55 for at_s in found)
    night = sum(at_s % 100 < 5 or at_s % 100 >= 95 for at_s in found)
    assert noon / night == pytest.approx(1.8 / 0.2, rel=0.2)


def test_steps_change_the_rate_once_and_stay() -> None:
    found = times_s(arrivals.steps([(100.0, 10.0), (1.0, 40.0)]), 8_000)
    assert sum(at_s < 100 for at_s in found) == pytest.approx(1000, rel=0.1)
    late = [at_s for at_s in found if at_s >= 100]
    assert len(late) / (late[-1] - 100) == pytest.approx(40, rel=0.06)


def test_a_pause_has_no_arrivals() -> None:
    found = times_s(Rates(((10.0, 5.0), (30.0, 0.0))), 300)
    assert all(at_s % 40 <= 10 for at_s in found)


@pytest.mark.parametrize("segments", [(), ((1.0, 0.0),), ((0.0, 1.0),), ((1.0, -1.0),)])
def test_rates_that_mean_nothing_are_refused(segments: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ValueError, match="rate"):
        Rates(segments)


@pytest.mark.parametrize("burstiness", [0.0, -1.0, math.nan])
def test_burstiness_is_above_zero(burstiness: float) -> None:
    with pytest.raises(ValueError, match="burstiness"):
        next(arrivals.independent(arrivals.constant(1.0), LENGTHS, 0, burstiness))


@pytest.mark.parametrize(
    ("given", "expected"),
    [((10, 10), (10, 10)), ((90, 10), (50, 10)), ((10, 95), (10, 90)), ((500, 500), (50, 50))],
)
def test_pairs_are_cut_to_fit(given: tuple[int, int], expected: tuple[int, int]) -> None:
    assert arrivals.cut(*given, 50, 100) == expected


def test_an_output_is_never_cut_away() -> None:
    assert arrivals.cut(500, 3, None, 100) == (99, 1)


def azure(path: Path, count: int) -> Path:
    rows = [f"2023-11-16 18:00:{n // 10:02d}.{n % 10}000000,{n + 1},{2 * n + 1}" for n in range(count)]
    with gzip.open(path, "wt") as file:
        file.write("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows) + "\n")
    return path


def test_a_window_of_a_trace_is_stretched_to_a_rate(tmp_path: Path) -> None:
    path = azure(tmp_path / "trace.csv.gz", 100)
    window = Trace("azure", path, start_s=2.0, duration_s=3.0)
    recorded = list(window.requests())
    assert [r.prompt_tokens for r in recorded] == list(range(21, 51))
    assert recorded[0].at_ns == 0
    assert window.recorded_rate() == pytest.approx(10.0)
    stretched = list(Trace("azure", path, start_s=2.0, duration_s=3.0, rate=2.5).requests())
    assert [r.at_ns for r in stretched] == pytest.approx([4 * r.at_ns for r in recorded], abs=1000)


def test_a_trace_is_read_as_far_as_it_is_played(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("Timestamp,Request tokens,Response tokens\n0,1,1\n1,2,2\n2,oops,3\n")
    source = Trace("burstgpt", path).requests()
    assert [next(source).prompt_tokens, next(source).prompt_tokens] == [1, 2]
    with pytest.raises(TraceError, match="not this kind of trace"):
        next(source)


def test_a_window_without_requests_has_no_rate(tmp_path: Path) -> None:
    path = azure(tmp_path / "trace.csv.gz", 10)
    with pytest.raises(ValueError, match="no two requests"):
        Trace("azure", path, start_s=100.0).recorded_rate()


def programs(**changes: object) -> Programs:
    values: dict[str, object] = {"rates": arrivals.constant(20.0), "draw": LENGTHS, "seed": 5, "mean_calls": 3.0}
    return Programs(**{**values, **changes})  # type: ignore[arg-type]  # fields by name


def test_a_call_comes_after_the_last_answer_and_a_pause_and_remembers() -> None:
    chain = programs(mean_calls=500.0, max_total=10**6)
    first = next(chain.requests())
    second = chain.after(first, 50 * S)
    assert second is not None
    assert second.at_ns > 50 * S
    assert (second.program, second.call) == (first.program, 1)
    assert second.prompt_tokens == first.prompt_tokens + first.output_tokens + 5


def test_programs_have_their_mean_of_calls_and_end_before_they_outgrow_the_model() -> None:
    chain = programs(max_total=10**9)
    counts = []
    for first in itertools.islice(chain.requests(), 2000):
        last, calls = first, 1
        while (following := chain.after(last, last.at_ns)) is not None:
            last, calls = following, calls + 1
        counts.append(calls)
    assert stats.mean(counts) == pytest.approx(3.0, rel=0.06)
    small = programs(mean_calls=50.0, max_total=40)
    request: Request | None = next(small.requests())
    while request is not None:
        assert request.prompt_tokens + request.output_tokens <= 40
        request = small.after(request, request.at_ns)


def test_programs_are_the_same_under_every_policy() -> None:
    def served(policy: str) -> list[tuple[int, int]]:
        chain = programs()
        draw = arrivals.lengths_of(SHAREGPT, 40, 80)
        chain.draw = draw
        chain.max_total = 128
        outcome = Fleet(plant(policy=policy)).run(itertools.islice(chain.requests(), 20), follow_up=chain.after)
        rows = outcome.recorder.finished
        return sorted(zip(rows.prompt, rows.output, strict=True))

    assert served("fcfs") == served("skip-join-mlfq")
    assert len(served("fcfs")) > 20


def test_saturation_is_everybody_at_once() -> None:
    found = list(arrivals.at_once(5, lambda rng: (rng.randrange(1, 9), 2), 1))
    assert [r.at_ns for r in found] == [0] * 5
    assert len({r.prompt_tokens for r in found}) > 1


def test_callers_say_what_they_know_and_always_the_same() -> None:
    request = Request(5, 10, 20)
    assert Callers(1).says(request) == replace(request, max_output_tokens=20)
    assert Callers(1, room=100).says(request).max_output_tokens == 90
    assert Callers(1, room=25).says(request).max_output_tokens == 20
    hinting = Callers(1, room=10**6, hint_error=0.7)
    assert hinting.says(request) == hinting.says(request)
    hints = [hinting.says(Request(n, 10, 20)).expected_output_tokens for n in range(4000)]
    logs = [math.log(hint / 20) for hint in hints]
    assert stats.mean(logs) == pytest.approx(0, abs=0.05)
    assert stats.std(logs) == pytest.approx(0.7, rel=0.06)
    # The calls of a program are known by their number: when they come depends on the policy.
    late, early = (replace(request, at_ns=at_ns, program="p", call=2) for at_ns in (9, 1))
    assert hinting.says(late).expected_output_tokens == hinting.says(early).expected_output_tokens
