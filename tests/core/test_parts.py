"""The parts alone: configuration, profile, block ledger, ranked jobs, workload."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve_scheduler.core import PRESETS, MlfqConfig, Profile
from fastserve_scheduler.core.blocks import BlockError, BlockPool, BlockTable
from fastserve_scheduler.core.job import Job
from fastserve_scheduler.core.ranked import FIRST, RankedJobs
from fastserve_scheduler.sim.cost import OPT_13B_A100
from fastserve_scheduler.sim.workload import SHAREGPT_INPUT, SHAREGPT_OUTPUT, Lognormal

from .support import MS, PROFILE, config, mlfq


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_stages": 0}, "num_stages"),
        ({"block_size": 0}, "block_size"),
        ({"max_batch_size": 0}, "max_batch_size"),
        ({"max_batch_tokens": 0}, "max_batch_tokens"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"prefill_chunk_tokens": -1}, "prefill_chunk_tokens"),
        ({"prefill_chunk_tokens": 1001}, "prefill_chunk_tokens"),
        ({"max_waiting_jobs": 0}, "max_waiting_jobs"),
        ({"max_waiting_tokens": 999}, "max_waiting_tokens"),
        ({"policy": "lottery"}, "policy must be one of skip-join-mlfq"),
        ({"kv_policy": "hope"}, "kv_policy must be one of proactive"),
        ({"service_classes": (("", 1),)}, "service_classes"),
        ({"service_classes": (("a", 1), ("a", 2))}, "service_classes"),
        ({"service_classes": (("a", 0),)}, "alpha_ns"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        config(**changes)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ratio", 1),
        ("num_levels", -1),
        ("num_levels", 65),
        ("eta", 0),
        ("alpha_ns", 0),
        ("promotion", "never"),
        ("demote_when", "bored"),
        ("overrun", "ignore"),
    ],
)
def test_a_wrong_queue_setting_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"MlfqConfig\.{field}"):
        mlfq(**{field: value})


def test_the_paper_is_a_preset() -> None:
    assert PRESETS["paper"] == MlfqConfig(ratio=2, eta=1, alpha_ns=300 * MS, promotion="reset")
    assert PRESETS["default"] == MlfqConfig(alpha_ns=10_000 * MS, promotion="reset")


@pytest.mark.parametrize(
    ("prefill", "decode", "named"),
    [
        ((), ((1, 1, 5),), "prefill is empty"),
        (((1, 5),), (), "decode is empty"),
        (((4, 5), (2, 9)), ((1, 1, 5),), "prefill is not sorted"),
        (((4, 5), (4, 9)), ((1, 1, 5),), "prefill is not sorted"),
        (((1, 5),), ((2, 1, 5), (1, 1, 5)), "decode is not sorted"),
        (((1, 0),), ((1, 1, 5),), "prefill has a value that is not positive"),
        (((1, 5),), ((1, 1, -5),), "decode has a value that is not positive"),
        (((32, 2_000), (256, 2_000)), ((1, 1, 5),), "impossible"),
        (((32, 2_000), (65_536, 3_000)), ((1, 1, 5),), "impossible"),
    ],
)
def test_an_impossible_profile_is_refused(
    prefill: tuple[tuple[int, int], ...], decode: tuple[tuple[int, int, int], ...], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        Profile(prefill, decode)


def test_times_between_and_beyond_the_points_lie_on_straight_lines() -> None:
    profile = Profile(((10, 100), (20, 300), (40, 400)), ((1, 10, 50), (1, 30, 70), (4, 10, 80), (4, 30, 160)))
    assert [profile.prefill_ns(tokens) for tokens in (10, 15, 20, 30, 40, 60)] == [100, 200, 300, 350, 400, 500]
    assert profile.prefill_ns(1) == 1, "drawn on below zero, but never below 1"
    assert profile.min_decode_ns == 50
    assert [profile.decode_ns(1, context) for context in (10, 20, 50)] == [50, 60, 90]
    assert [profile.decode_ns(batch, 10) for batch in (1, 2, 4, 7)] == [50, 60, 80, 110]
    assert profile.decode_ns(1, 1) == 50


@given(
    points=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 10**6)), min_size=1, max_size=6),
    lengths=st.tuples(st.integers(1, 50), st.integers(1, 50)),
)
def test_a_longer_prompt_is_never_expected_to_be_faster(
    points: list[tuple[int, int]], lengths: tuple[int, int]
) -> None:
    profile = Profile(tuple(sorted(dict(points).items())), ((1, 1, 5),))
    assert profile.prefill_ns(min(lengths)) <= profile.prefill_ns(max(lengths))


def test_a_cost_model_profiles_itself() -> None:
    profile = OPT_13B_A100.profile(2048, 16)
    assert profile.min_decode_ns == pytest.approx(19_939_127)
    assert profile.prefill_ns(2048) == 18_100_000 + 102_000 * 2048 + round(7.1 * 2048 * 2048)


def test_blocks_are_owned_once_and_freed_once() -> None:
    pool = BlockPool(4)
    pool.resize(3)
    first, second = BlockTable(), BlockTable()
    pool.grow(first, 5)
    assert (len(first), pool.num_free, pool.missing(first, 9)) == (2, 1, 1)
    with pytest.raises(BlockError, match="2 blocks asked, 1 free"):
        pool.grow(second, 5)
    assert (len(second), pool.num_free) == (0, 1)
    with pytest.raises(BlockError, match="owned"):
        pool.resize(9)
    stolen = BlockTable(first.block_ids)
    assert pool.release(first) == 2
    assert pool.release(first) == 0
    with pytest.raises(BlockError, match="twice"):
        pool.release(stolen)
    assert sorted(pool.free_ids()) == [0, 1, 2]


def _job(rank: tuple[int, ...]) -> Job:
    job = Job(rank[-1], 1, 1, "", 0, 1, 0, 0)
    job.rank = rank
    return job


@given(ranks=st.lists(st.tuples(st.integers(-1, 3), st.integers(0, 400)), unique=True, max_size=60), data=st.data())
def test_ranked_jobs_are_a_sorted_list(ranks: list[tuple[int, int]], data: st.DataObject) -> None:
    ranked = RankedJobs()
    jobs = {rank: _job(rank) for rank in ranks}
    for job in jobs.values():
        ranked.add(job)
    gone = data.draw(st.lists(st.sampled_from(ranks), unique=True)) if ranks else []
    for rank in gone:
        ranked.remove(jobs.pop(rank))
    order = sorted(jobs)
    assert [job.rank for job in ranked] == order
    assert len(ranked) == len(order)
    cursors: list[tuple[int, ...]] = [FIRST, *ranks]
    for cursor in cursors:
        after, before = ranked.after(cursor), ranked.before(cursor)
        assert (after and after.rank) == next((other for other in order if other > cursor), None)
        assert (before and before.rank) == next((other for other in reversed(order) if other < cursor), None)
    last = ranked.last()
    assert (last and last.rank) == (order[-1] if order else None)


def test_ranked_jobs_stay_sorted_through_many_cuts_and_refuse_a_rank_twice() -> None:
    ranked = RankedJobs()
    ranks = [(number // 7, number) for number in range(3000)]
    shuffled = random.Random(3).sample(ranks, len(ranks))
    jobs = {rank: _job(rank) for rank in shuffled}
    for job in jobs.values():
        ranked.add(job)
    assert [job.rank for job in ranked] == ranks
    with pytest.raises(ValueError, match="taken"):
        ranked.add(_job(ranks[5]))
    for rank in shuffled[:2900]:
        ranked.remove(jobs[rank])
    assert [job.rank for job in ranked] == sorted(shuffled[2900:])
    assert jobs[shuffled[2950]] in ranked
    assert jobs[shuffled[0]] not in ranked


@pytest.mark.parametrize(("lengths", "mean"), [(SHAREGPT_INPUT, 118), (SHAREGPT_OUTPUT, 340)])
def test_the_workload_has_the_lengths_it_names(lengths: Lognormal, mean: int) -> None:
    random_ = random.Random(1)
    drawn = [lengths.draw(random_) for _ in range(20_000)]
    assert sum(drawn) / len(drawn) == pytest.approx(mean, rel=0.02)
    assert max(drawn) <= lengths.longest


def test_profiles_of_the_tests_are_what_they_say() -> None:
    assert PROFILE.prefill_ns(250) == 250 * MS
    assert PROFILE.decode_ns(7, 300) == 10 * MS
