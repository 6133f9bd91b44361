"""Cost models: what they add up, where they are exact, and how far each is from what was measured."""

import json
from pathlib import Path

import pytest

from fastserve_scheduler.core.commands import PlanItem, RunIteration
from fastserve_scheduler.core.profile import Profile
from fastserve_scheduler.profile_file import ProfileFileError, read_profile
from fastserve_scheduler.profiler import ProfileKey, ProfileStore
from fastserve_scheduler.sim.calibration import CALIBRATION, Point, predicted_ms
from fastserve_scheduler.sim.cost import OPT_2_7B_PAPER, CostModel, decode_plan, iteration_ns, prefill_plan, profile_of
from fastserve_scheduler.sim.devices import DEVICES
from fastserve_scheduler.sim.measured import ProfileCost
from fastserve_scheduler.sim.models import MODELS
from fastserve_scheduler.sim.roofline import RooflineCost

from .support import COST

MS = 1_000_000
PROFILE = Profile(
    ((16, 10 * MS), (128, 24 * MS), (512, 90 * MS)),
    ((1, 16, 5 * MS), (1, 512, 6 * MS), (8, 16, 7 * MS), (8, 512, 11 * MS)),
)


def roofline(model: str = "opt-13b", device: str = "a100-80", tp: int = 1, pp: int = 1) -> RooflineCost:
    return RooflineCost(MODELS[model], DEVICES[device], tp, pp)


@pytest.mark.parametrize("point", CALIBRATION, ids=lambda point: point.name)
def test_every_calibration_error_is_the_one_that_is_stated(point: Point) -> None:
    """A change of a device's numbers must say here what it does to each of the measurements."""
    error_percent = 100 * (predicted_ms(point) / point.measured_ms - 1)
    assert error_percent == pytest.approx(point.error_percent, abs=0.6)


def test_what_the_fit_was_made_with_is_met_within_fifteen_percent() -> None:
    fitted = [point for point in CALIBRATION if point.fitted]
    assert len(fitted) >= 20
    assert all(abs(point.error_percent) <= 15 for point in fitted)


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("opt-2.7b", 2.65),
        ("opt-13b", 12.85),
        ("opt-66b", 65.7),
        ("opt-175b", 174.6),
        ("llama-2-7b", 6.74),
        ("llama-3-8b", 8.03),
        ("llama-3-70b", 70.6),
        ("qwen3-8b", 8.19),
        ("smollm2-135m", 0.1345),
    ],
)
def test_the_shapes_have_the_published_sizes(model: str, billions: float) -> None:
    assert MODELS[model].num_parameters / 1e9 == pytest.approx(billions, rel=0.005)


def test_kv_bytes_are_those_of_the_paper() -> None:
    assert roofline("opt-13b").kv_bytes_per_token == 819_200
    # OPT-175B, 512 tokens: 2.3 GB in the paper.
    tokens = 513 * roofline("opt-175b", "a100-40", tp=8, pp=2).kv_bytes_per_token
    assert tokens / 2**30 == pytest.approx(2.3, rel=0.03)
    # Grouped-query attention: 8 of 64 heads have KV.
    assert roofline("llama-3-70b", tp=4).kv_bytes_per_token == 2 * 80 * 8 * 128 * 2


def test_parallel_ranks_share_weights_and_pay_for_talking() -> None:
    one, four = roofline("opt-13b"), roofline("opt-13b", tp=4)
    alone_ns, split_ns = (iteration_ns(cost, prefill_plan(2048), 1) for cost in (one, four))
    assert alone_ns / 4 < split_ns < alone_ns / 2
    assert four.stage_kv_bytes_per_token() * 4 == one.stage_kv_bytes_per_token()


def test_stages_divide_an_iteration_and_the_last_one_samples() -> None:
    cost = roofline("opt-13b", pp=3)
    times = [cost.stage_ns(decode_plan(8, 100), stage) for stage in range(3)]
    assert times[0] > times[1]  # 14, 13 and 13 layers
    assert times[2] > times[1]  # the vocabulary
    whole = iteration_ns(roofline("opt-13b"), decode_plan(8, 100), 1)
    assert sum(times) == pytest.approx(whole, rel=0.05)


def test_the_paper_s_own_numbers_are_there_as_they_are_printed() -> None:
    times = [
        OPT_2_7B_PAPER.stage_ns(plan, 0) / MS for plan in (prefill_plan(128), prefill_plan(1024), decode_plan(1, 9))
    ]
    assert times == pytest.approx([10, 90, 2], rel=1e-3)


def test_times_grow_with_everything_that_is_asked_for() -> None:
    cost = roofline("llama-3-8b", "h100")
    base = cost.stage_ns(decode_plan(8, 512), 0)
    assert cost.stage_ns(decode_plan(16, 512), 0) > base
    assert cost.stage_ns(decode_plan(8, 4096), 0) > base
    mixed = RunIteration(0, 0, (*decode_plan(8, 512).items, PlanItem(99, 0, 256, True, 0, ())))
    assert max(base, cost.stage_ns(prefill_plan(256), 0)) < cost.stage_ns(mixed, 0)
    assert cost.stage_ns(mixed, 0) < base + cost.stage_ns(prefill_plan(256), 0)


def test_chunks_of_a_prompt_cost_what_they_attend_to() -> None:
    cost = roofline()
    early = RunIteration(0, 0, (PlanItem(1, 0, 256, False, 0, ()),))
    late = RunIteration(0, 0, (PlanItem(1, 1792, 256, True, 0, ()),))
    assert cost.stage_ns(late, 0) > cost.stage_ns(early, 0)


@pytest.mark.parametrize(
    ("model", "device", "tp", "pp", "sentence"),
    [("opt-13b", "a100-40", 3, 1, "not to be split"), ("opt-13b", "a100-40", 1, 41, "has 40 layers")],
)
def test_what_cannot_be_split_is_refused(model: str, device: str, tp: int, pp: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        roofline(model, device, tp, pp)


def test_memory_is_what_weights_leave() -> None:
    tokens = roofline("opt-13b", "a100-40").free_kv_bytes() // 819_200
    assert tokens == pytest.approx(14_900, rel=0.12)  # as DistServe's engine reports it
    with pytest.raises(ValueError, match="does not fit 1 x a100-80"):
        roofline("opt-66b").free_kv_bytes()


def test_a_profile_is_exact_where_it_was_measured() -> None:
    cost = ProfileCost(PROFILE)
    for tokens, ns in PROFILE.prefill:
        assert cost.stage_ns(prefill_plan(tokens), 0) == ns
    for batch, context, ns in PROFILE.decode:
        assert cost.stage_ns(decode_plan(batch, context), 0) == ns


def test_a_mixed_iteration_pays_its_fixed_part_once() -> None:
    cost = ProfileCost(PROFILE)
    mixed = RunIteration(0, 0, (*decode_plan(8, 16).items, PlanItem(99, 0, 128, True, 0, ())))
    assert cost.stage_ns(mixed, 0) == 24 * MS + 7 * MS - 5 * MS


def test_chunks_of_a_profiled_prompt_add_up() -> None:
    cost = ProfileCost(PROFILE)
    halves = [RunIteration(0, 0, (PlanItem(1, start, 256, start > 0, 0, ()),)) for start in (0, 256)]
    whole = cost.stage_ns(prefill_plan(512), 0)
    once_more = cost.stage_ns(RunIteration(0, 0, (PlanItem(1, 0, 1, True, 0, ()),)), 0)
    assert sum(cost.stage_ns(half, 0) for half in halves) == pytest.approx(whole + once_more, rel=0.03)


def test_shares_of_stages_divide_a_profiled_iteration() -> None:
    cost = ProfileCost(PROFILE, (0.75, 0.25))
    assert [cost.stage_ns(prefill_plan(16), stage) for stage in (0, 1)] == [7_500_000, 2_500_000]
    with pytest.raises(ValueError, match="add up to 1"):
        ProfileCost(PROFILE, (0.75, 0.75))


@pytest.mark.parametrize("cost", [COST, roofline("opt-13b")], ids=["linear", "roofline"])
def test_what_a_profiler_would_measure_predicts_the_model(cost: CostModel) -> None:
    again = ProfileCost(profile_of(cost, 1, 2048, 16))
    for plan in (prefill_plan(100), prefill_plan(1500), decode_plan(3, 700), decode_plan(16, 2000)):
        assert again.stage_ns(plan, 0) == pytest.approx(cost.stage_ns(plan, 0), rel=0.07)


def test_a_file_of_the_profiler_is_read_with_what_it_was_measured_of(tmp_path: Path) -> None:
    path = ProfileStore(tmp_path).save(ProfileKey("finger", "float32", "cpu", 2), PROFILE)
    stored = read_profile(path)
    assert (stored.profile, stored.fingerprint, stored.num_stages) == (PROFILE, "finger", 2)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "is not a profile"),
        ("[]", "is not a profile"),
        (json.dumps({"schema": 9}), "has profile schema 9"),
        (json.dumps({"schema": 1, "key": {}, "profile": {"prefill": [], "decode": []}}), "profile.prefill is empty"),
    ],
)
def test_what_is_no_profile_is_said_in_a_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "p"
    path.write_text(text)
    with pytest.raises(ProfileFileError, match=sentence):
        read_profile(path)
