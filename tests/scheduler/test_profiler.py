"""Profiles: what is measured, what is believed, what is kept."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from fastserve_scheduler import profile_only, profiler
from fastserve_scheduler.core.profile import Profile
from fastserve_scheduler.messages import Measure, Measured, Point, Ready
from fastserve_scheduler.profiler import ProfileError, ProfileKey, Profiler, ProfileStore, build_profile, choose_points

from .rig import Cluster, SchedulerProcess, until

READY = Ready(1, 0, 1, 256, 16, 2048, 1000, "model", 1024, "cpu", "float32")
KEY = ProfileKey("model", "float32", "cpu", 1)
PROFILE = Profile(((16, 10), (512, 90)), ((1, 16, 5), (4, 16, 6)))


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("num_blocks", [1, 2, 40, 100_000])
@pytest.mark.parametrize("max_model_len", [8, 100, 8192])
@pytest.mark.parametrize("max_batch", [1, 16, 256])
def test_points_fit_the_pool_and_make_a_profile(
    full: bool, num_blocks: int, max_model_len: int, max_batch: int
) -> None:
    ready = replace(READY, num_blocks=num_blocks, max_model_len=max_model_len)
    points = choose_points([ready], max_batch, full=full)
    for point in points:
        tokens = point.new_tokens + point.context_tokens
        assert tokens <= max_model_len
        assert point.num_sequences == 1 or point.num_sequences * tokens <= num_blocks * ready.block_size
    times = [p.new_tokens * p.num_sequences * 100 + p.context_tokens for p in points]
    profile = build_profile(points, {0: times})
    assert profile.prefill[0][0] <= 16
    assert profile.decode[0][0] == 1


def test_stages_are_summed_the_first_run_is_left_out_and_the_fastest_counts() -> None:
    points = (Point(1, 16, 0), Point(1, 16, 0), Point(1, 1, 8), Point(1, 1, 8), Point(1, 1, 8))
    profile = build_profile(points, {0: [900, 100, 9, 5, 7], 1: [900, 200, 1, 5, 3]})
    assert profile.prefill == ((16, 300),)
    assert profile.decode == ((1, 8, 10),)


def test_times_of_launches_are_not_believed() -> None:
    points = (Point(1, 16, 0), Point(1, 16, 0), Point(1, 512, 0), Point(1, 1, 8))
    with pytest.raises(ProfileError, match="impossible"):
        build_profile(points, {0: [9, 5, 5, 3]})


def test_a_stored_profile_is_found_again_by_its_key_only(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path / "new" / "folder")
    assert store.load(KEY) is None
    path = store.save(KEY, PROFILE)
    assert store.load(KEY) == PROFILE
    assert list(path.parent.iterdir()) == [path], "no draft stays"
    for other in (replace(KEY, fingerprint="x"), replace(KEY, dtype="x"), replace(KEY, num_stages=2)):
        assert store.load(other) is None


@pytest.mark.parametrize("damage", ["not json", '{"schema": 1}', '{"schema": 0}', "[]", "other key"])
def test_a_file_that_does_not_fit_is_as_good_as_none(tmp_path: Path, damage: str) -> None:
    store = ProfileStore(tmp_path)
    path = store.save(KEY, PROFILE)
    if damage == "other key":
        stored = json.loads(path.read_text())
        stored["key"]["device"] = "cuda"
        damage = json.dumps(stored)
    path.write_text(damage)
    assert store.load(KEY) is None


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ProfileError, match="cannot write"):
        ProfileStore(tmp_path / "file").save(KEY, PROFILE)


async def test_answers_to_other_orders_and_of_the_wrong_length_are_dropped(tmp_path: Path) -> None:
    sent: list[Measure] = []
    measuring = Profiler(ProfileStore(tmp_path), sent.append, 4)
    task = asyncio.create_task(measuring.obtain([READY], 1))
    await until(lambda: bool(sent))
    times = tuple(p.new_tokens * p.num_sequences * 100 + p.context_tokens for p in sent[0].points)
    measuring.on_measured(0, Measured(sent[0].profile_id + 1, 0, times))
    measuring.on_measured(0, Measured(sent[0].profile_id, 0, times[1:]))
    await asyncio.sleep(0)
    assert not task.done()
    measuring.on_measured(0, Measured(sent[0].profile_id, 0, times))
    profile = await task
    assert await measuring.obtain([READY], 2) == profile
    assert len(sent) == 1, "the second time it is read"


@pytest.mark.parametrize("grows_later", [True, False])
async def test_flat_times_are_measured_again_and_then_believed_but_not_kept(tmp_path: Path, grows_later: bool) -> None:
    """A wide device takes as long for 512 tokens as for 16."""
    sent: list[Measure] = []
    measuring = Profiler(ProfileStore(tmp_path), sent.append, 4)
    task = asyncio.create_task(measuring.obtain([READY], 1))
    for attempt in (1, 2):
        await until(lambda attempt=attempt: len(sent) == attempt)  # type: ignore[misc]
        order = sent[-1]
        flat = tuple(100 + (point.new_tokens if grows_later and attempt == 2 else 0) for point in order.points)
        measuring.on_measured(0, Measured(order.profile_id, 0, flat))
    profile = await task
    assert max(point.new_tokens for point in sent[1].points) == 2047, "the second range is the widest"
    assert (profile.prefill_ns(16) < profile.prefill_ns(2047)) is grows_later
    assert (ProfileStore(tmp_path).load(KEY) is not None) is grows_later


async def test_a_silent_stage_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "MEASURE_TIMEOUT_S", 0.01)
    measuring = Profiler(ProfileStore(tmp_path), lambda order: None, 4)
    with pytest.raises(ProfileError, match=r"stages \[0, 1\]"):
        await measuring.obtain([READY, replace(READY, stage=1)], 1)


def _read(path: str) -> dict[str, dict[str, list[list[int]]]]:
    return dict(json.loads(Path(path).read_text()))


async def test_profile_only_measures_prints_and_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with Cluster(tmp_path, 2) as cluster:
        settings = cluster.settings("--max-num-seqs", "8", "--profile-only")
        assert await profile_only.run(settings, asyncio.Event()) == 1, "a scheduler leads"
        await cluster.schedulers[0].end()
        assert await profile_only.run(settings, asyncio.Event()) == 0
        *table, path = capsys.readouterr().out.splitlines()
        stored = _read(path)
        assert [p[0] for p in stored["profile"]["prefill"]] == [16, 32, 64, 128, 256, 511]
        assert {p[0] for p in stored["profile"]["decode"]} == {1, 2, 4, 8}
        assert len(table) == 3 + len(stored["profile"]["prefill"]) + len(stored["profile"]["decode"])
        cluster.schedulers.append(SchedulerProcess(cluster.settings()))
        await cluster.find_scheduler(cluster.schedulers[-1])
        await cluster.gateway()
