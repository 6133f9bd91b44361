"""Draws against the reference, and what must not change them."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fastserve_common.packed import pack_u32
from fastserve_worker.sampling.params import DrawParams
from fastserve_worker.sampling.row import change_logits, draw_from_row
from fastserve_worker.sampling.sampler import draw_tokens
from fastserve_worker.sampling.uniform import uniform

from .reference import adjusted_logits, edge_margin, probabilities

VOCAB = 12

#: Coarse, so that equal logits are common.
row_logits = st.lists(st.integers(-12, 12).map(lambda n: n / 4), min_size=VOCAB, max_size=VOCAB)
id_lists = st.lists(st.integers(0, VOCAB - 1), max_size=6)


@st.composite
def draw_params(draw: st.DrawFn) -> DrawParams:
    penalised = draw(st.booleans())
    return DrawParams(
        output_position=draw(st.integers(0, 2000)),
        temperature=draw(st.sampled_from([0.0, 0.1, 0.7, 1.0, 2.0])),
        top_k=draw(st.sampled_from([0, 1, 3, VOCAB, 100])),
        top_p=draw(st.sampled_from([1.0, 0.95, 0.5, 0.05])),
        min_p=draw(st.sampled_from([0.0, 0.02, 0.3])),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        presence_penalty=draw(st.sampled_from([0.0, 0.5, -1.0])) if penalised else 0.0,
        frequency_penalty=draw(st.sampled_from([0.0, 0.3, -0.2])) if penalised else 0.0,
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.8])) if penalised else 1.0,
        logit_bias=draw(st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, 1.5]), max_size=3)),
        suppressed=pack_u32(draw(st.lists(st.integers(0, VOCAB - 2), max_size=3))),
        penalty_prompt=pack_u32(draw(id_lists)) if penalised else b"",
        penalty_output=pack_u32(draw(id_lists)) if penalised else b"",
    )


@given(row_logits, draw_params())
def test_a_draw_follows_the_reference(logits: list[float], params: DrawParams) -> None:
    assume(params.temperature == 0 or edge_margin(logits, params) > 1e-5)
    expected = probabilities(logits, params)
    token_id = draw_from_row(np.array(logits, dtype=np.float32), params)
    if params.temperature == 0:
        adjusted = adjusted_logits(logits, params)
        assert adjusted[token_id] >= adjusted.max() - 1e-5
        return
    assert expected[token_id] > 0
    point, upper = uniform(params.seed, params.output_position), expected[: token_id + 1].sum()
    assert upper - expected[token_id] - 1e-5 <= point <= upper + 1e-5


@given(st.lists(row_logits, min_size=1, max_size=4), st.lists(draw_params(), min_size=4, max_size=4))
def test_batch_mates_change_nothing(rows: list[list[float]], params: list[DrawParams]) -> None:
    logits = torch.tensor(rows)
    before = logits.clone()
    together = draw_tokens(logits, params[: len(rows)])
    alone = [draw_tokens(logits[i : i + 1], [params[i]])[0] for i in range(len(rows))]
    assert list(together) == alone
    assert torch.equal(logits, before)


@given(row_logits, draw_params())
def test_penalties_and_biases_match_the_reference(logits: list[float], params: DrawParams) -> None:
    changed = np.array(logits, dtype=np.float32)
    change_logits(changed, params)
    np.testing.assert_allclose(changed, adjusted_logits(logits, params), rtol=1e-5, atol=1e-5)


def test_repetition_counts_prompt_and_output_but_presence_and_frequency_only_output() -> None:
    logits = np.array([2.0, 2.0, 2.0, -2.0], dtype=np.float32)
    params = DrawParams(
        output_position=2,
        repetition_penalty=2.0,
        frequency_penalty=0.25,
        presence_penalty=0.5,
        penalty_prompt=pack_u32([0, 3]),
        penalty_output=pack_u32([1, 1]),
    )
    change_logits(logits, params)
    assert logits.tolist() == [1.0, 0.0, 2.0, -4.0]


@pytest.mark.parametrize("position", [0, 1])
def test_an_unpenalised_neighbour_is_not_penalised(position: int) -> None:
    logits = torch.tensor([[3.0, 2.0, 0.0]]).repeat(2, 1)
    penalised = DrawParams(output_position=1, repetition_penalty=2.0, penalty_prompt=pack_u32([0]))
    params = [DrawParams(output_position=1), DrawParams(output_position=1)]
    params[position] = penalised
    ids = [draw.token_id for draw in draw_tokens(logits, params)]
    assert ids[position] == 1
    assert ids[1 - position] == 0


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.tensor([[0.0, 5.0, 5.0], [5.0, 0.0, 5.0]])
    plain = DrawParams(output_position=0)
    biased = plain._replace(logit_bias={0: -1.0})
    assert [draw.token_id for draw in draw_tokens(logits, [plain, plain])] == [1, 0]
    assert [draw.token_id for draw in draw_tokens(logits, [biased, biased])] == [1, 2]


def test_top_k_keeps_exactly_k_of_equals() -> None:
    logits = np.zeros(10, dtype=np.float32)
    drawn = {draw_from_row(logits, DrawParams(output_position=n, temperature=1, top_k=3)) for n in range(200)}
    assert drawn == {0, 1, 2}


@pytest.mark.parametrize(
    ("changes", "num_kept"), [({"top_p": 0.25}, 3), ({"top_p": 0.3, "min_p": 1.0}, 3), ({"min_p": 5.0}, 10)]
)
def test_top_p_and_min_p_of_equals(changes: dict[str, float], num_kept: int) -> None:
    params = DrawParams(output_position=0, temperature=1)
    drawn = {
        draw_from_row(np.zeros(10, dtype=np.float32), params._replace(output_position=n, **changes))  # type: ignore[arg-type]  # all changes are floats
        for n in range(300)
    }
    assert drawn == set(range(num_kept))


def test_a_tiny_temperature_is_greedy_and_a_large_vocabulary_works() -> None:
    logits = np.random.default_rng(0).normal(size=50_000).astype(np.float32)
    params = DrawParams(output_position=0, temperature=1e-38, top_p=0.9, min_p=0.1)
    assert draw_from_row(logits, params) == logits.argmax()


@pytest.mark.parametrize("params", [{}, {"top_p": 0.8}, {"top_k": 3}, {"min_p": 0.2}])
def test_frequencies_follow_the_probabilities(params: dict[str, float]) -> None:
    logits = [1.0, 0.0, 2.0, -1.0, 0.5]
    num_draws = 4_000
    draw = DrawParams(output_position=0, temperature=1.3, **params)  # type: ignore[arg-type]  # names and types as there
    expected = probabilities(logits, draw) * num_draws
    row = np.array(logits, dtype=np.float32)
    drawn = [draw_from_row(row, draw._replace(seed=seed)) for seed in range(num_draws)]
    counts = np.bincount(drawn, minlength=len(logits))
    kept = expected > 0
    assert counts[~kept].sum() == 0
    assert ((counts - expected)[kept] ** 2 / expected[kept]).sum() < 30  # chi-square, at most 4 degrees of freedom


def test_logprobs_are_of_the_untouched_logits() -> None:
    logits = torch.tensor([[0.5, 3.0, -1.0, 2.0]])
    params = DrawParams(output_position=0, logit_bias={2: 100.0}, temperature=0.5, logprobs=2)
    (draw,) = draw_tokens(logits, [params])
    expected = torch.log_softmax(logits[0], dim=0)
    assert draw.token_id == 2
    assert draw.logprob == pytest.approx(float(expected[2]))
    assert [token_id for token_id, _ in draw.top] == [1, 3]
    assert [logprob for _, logprob in draw.top] == pytest.approx([float(expected[1]), float(expected[3])])


@pytest.mark.parametrize(("logprobs", "num_top"), [(0, 0), (3, 3), (10**9, 4)])
def test_as_many_top_logprobs_as_asked_for(logprobs: int, num_top: int) -> None:
    (draw,) = draw_tokens(torch.tensor([[3.0, 2.0, 1.0, 0.0]]), [DrawParams(output_position=0, logprobs=logprobs)])
    assert draw.logprob is not None
    assert [token_id for token_id, _ in draw.top] == list(range(4))[:num_top]


def test_rows_that_did_not_ask_have_no_logprobs() -> None:
    params = [DrawParams(output_position=0), DrawParams(output_position=0, logprobs=1)]
    silent, asked = draw_tokens(torch.zeros(2, 4), params)
    assert silent.logprob is None
    assert silent.top == ()
    assert asked.logprob is not None


def test_ids_outside_the_vocabulary_have_nothing_to_change() -> None:
    logits = np.array([1.0, 0.0], dtype=np.float32)
    params = DrawParams(
        output_position=0,
        logit_bias={7: 5.0},
        suppressed=pack_u32([9]),
        repetition_penalty=1.5,
        presence_penalty=1.0,
        penalty_prompt=pack_u32([8]),
        penalty_output=pack_u32([6]),
    )
    assert draw_from_row(logits, params) == 0


def test_nothing_left_to_draw_is_an_error() -> None:
    logits = np.zeros(2, dtype=np.float32)
    params = DrawParams(output_position=0, temperature=1, suppressed=pack_u32([0, 1]))
    with pytest.raises(ValueError, match="no token is left"):
        draw_from_row(logits, params)


def test_every_row_needs_its_parameters() -> None:
    with pytest.raises(ValueError, match="1 draws from 2 rows"):
        draw_tokens(torch.zeros(2, 3), [DrawParams(output_position=0)])
