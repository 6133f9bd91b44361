"""Guesses of output lengths: who is believed, and when."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve_scheduler.core.job import Job
from fastserve_scheduler.core.lengths import MIN_SEEN, ONE, UNKNOWN, Guesser, Lengths, exp2, log2


def job(prompt: int = 10, limit: int = 4096, hint: int = 0, generated: int = 0) -> Job:
    return Job(1, prompt, limit, "", 0, limit, 0, generated, hint)


def served(lengths: Lengths, output: int, prompt: int = 10, hint: int = 0, limit: int = 4096) -> None:
    one = job(prompt, limit, hint)
    lengths.arrived(one)
    one.generated = output
    lengths.finished(one)


@given(tokens=st.integers(1, 1 << 20))
def test_logarithms_are_close_and_rising(tokens: int) -> None:
    assert abs(log2(tokens) / ONE - math.log2(tokens)) < 0.09
    assert log2(tokens + 1) >= log2(tokens)
    assert tokens * 0.998 - 1 <= exp2(log2(tokens)) <= tokens


def test_a_hint_is_believed_until_it_is_known_to_be_wrong() -> None:
    lengths, random_ = Lengths(), random.Random(1)
    asked = job(hint=300)
    lengths.arrived(asked)
    assert exp2(lengths.believed(asked)) == pytest.approx(300, abs=2)
    for _ in range(4 * MIN_SEEN):
        served(lengths, round(random_.lognormvariate(5, 1)), hint=round(random_.lognormvariate(5, 1)))
    assert lengths.believed(asked) == UNKNOWN
    assert lengths.records[Guesser.HINT].log_error > 1


@pytest.mark.parametrize(("sigma", "believed"), [(0.1, True), (0.7, True), (2.0, False)])
def test_a_noisy_hint_is_believed_while_its_log_error_is_below_one(sigma: float, believed: bool) -> None:
    lengths, random_ = Lengths(), random.Random(2)
    for _ in range(300):
        output = max(1, round(random_.lognormvariate(5, 1.1)))
        served(lengths, output, hint=max(1, round(output * math.exp(random_.gauss(0, sigma)))))
    record = lengths.records[Guesser.HINT]
    assert record.believed is believed
    assert record.log_error == pytest.approx(sigma, rel=0.35)


def test_hints_are_believed_again_when_they_have_become_right() -> None:
    lengths, random_ = Lengths(), random.Random(3)
    for wrong in (True, False):
        for _ in range(600):
            output = max(1, round(random_.lognormvariate(5, 1.1)))
            served(lengths, output, hint=5 if wrong else output)
        assert lengths.records[Guesser.HINT].believed is not wrong


def test_a_guess_that_is_close_to_all_and_tells_nobody_apart_is_not_believed() -> None:
    lengths, random_ = Lengths(), random.Random(4)
    for _ in range(300):
        served(lengths, max(1, round(random_.lognormvariate(5, 0.6))), hint=148)
    assert lengths.records[Guesser.HINT].log_error < 1
    assert not lengths.records[Guesser.HINT].believed


def test_history_learns_what_prompts_of_a_length_lead_to() -> None:
    lengths = Lengths()
    for number in range(200):
        served(lengths, 20 + number % 5, prompt=10)
        served(lengths, 400 + number % 50, prompt=1000)
    short, long = job(prompt=11), job(prompt=900)
    for one in (short, long):
        lengths.arrived(one)
    assert exp2(lengths.believed(short)) == pytest.approx(22, abs=3)
    assert exp2(lengths.believed(long)) == pytest.approx(420, abs=40)


def test_a_callers_limit_is_believed_where_answers_come_near_it() -> None:
    lengths, random_ = Lengths(), random.Random(5)
    for _ in range(200):
        limit = random_.choice([16, 64, 256, 1024])
        served(lengths, limit - limit // 8, limit=limit)
    asked = job(limit=256)
    lengths.arrived(asked)
    assert lengths.believed(asked) == log2(256)


def test_no_guess_exceeds_the_limit_and_somebody_always_has_one() -> None:
    lengths = Lengths()
    asked = job(limit=50, hint=900)
    lengths.arrived(asked)
    assert lengths.expected_tokens(asked) in (49, 50)
    plain = job(limit=50)
    lengths.arrived(plain)
    assert lengths.expected_tokens(plain) in (49, 50)
    served(lengths, 7)
    lengths.arrived(plain)
    assert lengths.expected_tokens(plain) in (6, 7)
    assert lengths.believed(plain) == UNKNOWN
