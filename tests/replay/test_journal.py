"""Journals: an incident that was recorded replays byte for byte, and a difference is found where it is."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastserve_scheduler import replay as command
from fastserve_scheduler.core.commands import FinishJob, FinishReason, PlanItem, RunIteration
from fastserve_scheduler.core.config import CoreConfig, MlfqConfig
from fastserve_scheduler.core.events import (
    Event,
    IterationDone,
    JobAborted,
    JobArrived,
    ProfileUpdated,
    StageDown,
    StageUp,
    Woke,
)
from fastserve_scheduler.core.profile import Profile
from fastserve_scheduler.core.scheduler import SchedulerCore
from fastserve_scheduler.journal import (
    JournalError,
    JournalWriter,
    decode_event,
    encode_commands,
    encode_event,
    read_header,
    replay,
)

JOURNALS = Path(__file__).with_name("journals")
PROFILE = Profile(((16, 10_000), (512, 90_000)), ((1, 16, 5_000), (4, 16, 6_000)))
CONFIG = CoreConfig(
    num_stages=1,
    block_size=4,
    max_batch_size=2,
    max_batch_tokens=64,
    max_model_len=64,
    mlfq=MlfqConfig(alpha_ns=77, promotion="return"),
    service_classes=(("fast", 5),),
)

counts = st.integers(0, 2**40)
events = st.one_of(
    st.builds(JobArrived, counts, counts, counts, counts, st.integers(-9, 9), st.text(max_size=5), counts),
    st.builds(JobAborted, counts),
    st.builds(IterationDone, counts, counts, counts, st.lists(counts, max_size=3).map(tuple)),
    st.builds(StageUp, counts, counts),
    st.builds(StageDown, counts),
    st.just(ProfileUpdated(PROFILE)),
    st.just(Woke()),
)


@settings(deadline=None)
@given(events)
def test_events_round_trip_through_json(event: Event) -> None:
    assert decode_event(json.loads(json.dumps(encode_event(event)))) == event


def test_commands_are_lists_of_plain_values() -> None:
    plan = RunIteration(1, 2, (PlanItem(3, 4, 5, True, 6, (7, 8)),))
    assert encode_commands([plan, FinishJob(3, FinishReason.STOP)]) == [
        ["RunIteration", 1, 2, [["PlanItem", 3, 4, 5, True, 6, [7, 8]]]],
        ["FinishJob", 3, "stop"],
    ]


def _write(path: Path, num_jobs: int, **limits: int) -> None:
    core = SchedulerCore(CONFIG, PROFILE)
    writer = JournalWriter(path, CONFIG, PROFILE, **limits)
    script: list[Event] = [StageUp(0, 16)]
    script += [JobArrived(n, 5, 3, service_class="fast") for n in range(num_jobs)]
    script += [IterationDone(n, 0, 50) for n in range(3 * num_jobs)]
    for now_ns, event in enumerate(script):
        writer.record(now_ns, event, core.handle(event, now_ns))
    writer.close()


def test_a_journal_carries_its_configuration(tmp_path: Path) -> None:
    _write(tmp_path / "j", 3)
    assert read_header(tmp_path / "j") == (CONFIG, PROFILE)


def test_a_journal_replays(tmp_path: Path) -> None:
    _write(tmp_path / "j", 3)
    result = replay(tmp_path / "j", check=True)
    assert result.divergence is None
    assert result.num_events == 13
    assert result.core.snapshot().finished == 3


def test_a_full_file_is_followed_by_the_next_and_all_of_them_replay(tmp_path: Path) -> None:
    _write(tmp_path / "j", 20, max_segment_bytes=3000)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files[:3] == ["j", "j.1", "j.2"]
    assert all(path.stat().st_size < 3600 for path in tmp_path.iterdir())
    result = replay(tmp_path / "j")
    assert (result.divergence, result.num_events) == (None, 81)


def test_too_many_files_end_the_journal_and_keep_its_beginning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _write(tmp_path / "j", 20, max_segment_bytes=3000, max_segments=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["j", "j.1"]
    assert "the journal is full" in caplog.text
    result = replay(tmp_path / "j")
    assert result.divergence is None
    assert 10 < result.num_events < 81


def test_a_new_journal_leaves_nothing_of_an_old_one_when_none_is_kept(tmp_path: Path) -> None:
    _write(tmp_path / "j", 20, max_segment_bytes=3000)
    _write(tmp_path / "j", 2, keep=0)
    assert [path.name for path in tmp_path.iterdir()] == ["j"]


def test_journals_of_earlier_starts_are_kept_and_replay(tmp_path: Path) -> None:
    for num_jobs in (1, 20, 2, 3):
        _write(tmp_path / "j", num_jobs, max_segment_bytes=3000, keep=2)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["j", "j.old1", "j.old2", *(f"j.old2.{n}" for n in range(1, len(names) - 2))]
    events = [replay(tmp_path / name).num_events for name in ("j", "j.old1", "j.old2")]
    assert events == [13, 9, 81]


def test_a_line_cut_short_by_a_crash_is_left_out(tmp_path: Path) -> None:
    _write(tmp_path / "j", 3)
    whole = (tmp_path / "j").read_text()
    (tmp_path / "j").write_text(whole[:-20])
    assert replay(tmp_path / "j").num_events == 12


def test_the_first_difference_is_shown_with_both_answers(tmp_path: Path) -> None:
    _write(tmp_path / "j", 3)
    lines = (tmp_path / "j").read_text().splitlines()
    entry = json.loads(lines[2])
    entry[2][0][1] = 99
    lines[2] = json.dumps(entry)
    (tmp_path / "j").write_text("\n".join(lines) + "\n")
    divergence = replay(tmp_path / "j").divergence
    assert divergence is not None
    assert divergence.number == 2
    assert divergence.entry.event == JobArrived(0, 5, 3, service_class="fast")
    assert str(divergence.entry.commands[0]).startswith("['RunIteration', 99,")
    assert str(divergence.replayed[0]).startswith("['RunIteration', 0,")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "not a journal"),
        ("[1]\n", "not a journal"),
        ('{"journal": 99}\n', "schema 99"),
        ('{"journal": 1, "config": {}, "profile": {}}\n', "not a journal"),
    ],
)
def test_what_is_no_journal_is_said_in_a_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "j").write_text(text)
    with pytest.raises(JournalError, match=sentence):
        replay(tmp_path / "j")


def test_an_event_of_another_version_is_said_in_a_sentence() -> None:
    with pytest.raises(JournalError, match="unknown event 'Moonrise'"):
        decode_event(["Moonrise", 1])


@pytest.mark.parametrize("journal", sorted(JOURNALS.glob("*.jsonl")), ids=lambda path: path.stem)
def test_recorded_incidents_replay_byte_for_byte(journal: Path) -> None:
    """When the core is meant to decide otherwise: see tests/scheduler/test_live_journal.py."""
    result = replay(journal, check=True)
    assert result.divergence is None
    assert result.num_events > 50


def test_the_command_tells_the_outcome_and_a_jobs_story(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write(tmp_path / "j", 3)
    assert command.main([str(tmp_path / "j"), "--story", "1"]) == 0
    *story, verdict = capsys.readouterr().out.splitlines()
    assert verdict == "13 events, the same commands"
    assert "arrived" in story[0]
    assert "finished" in story[-1]


def test_the_command_shows_a_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write(tmp_path / "j", 3)
    text = (tmp_path / "j").read_text().replace('"FinishJob",0,"length"', '"FinishJob",0,"stop"')
    (tmp_path / "j").write_text(text)
    assert command.main([str(tmp_path / "j")]) == 1
    shown = capsys.readouterr().out
    assert '"stop"' in shown
    assert '"length"' in shown


def test_the_command_says_when_it_knows_no_story(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write(tmp_path / "j", 3)
    assert command.main([str(tmp_path / "j"), "--story", "77"]) == 0
    assert capsys.readouterr().err == "fastserve: --story: nothing is remembered of job 77\n"


@pytest.mark.parametrize("argv", [[], ["j", "x"], ["j", "--story", "first"], ["j", "--stories", "1"]])
def test_the_command_refuses_flags_it_does_not_know(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        command.main(argv)
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("fastserve: ")
    assert error.count("\n") == 1


def test_the_command_says_which_file_is_no_journal(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["missing"]) == 2
    assert capsys.readouterr().err.startswith("fastserve: missing is not a journal: ")
