"""Journals: an incident that was recorded replays byte for byte, and a difference is found where it is."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastserve_scheduler import replay as command
from fastserve_scheduler.core.checkpoint import encode
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
from fastserve_scheduler.journal import JournalWriter
from fastserve_scheduler.journal_codec import UnknownEventError, decode_event, encode_commands, encode_event
from fastserve_scheduler.journal_reader import JournalError, ReplayResult, read_entries, read_header, replay

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


def _write(path: Path, num_jobs: int, **limits: int) -> SchedulerCore:
    core = SchedulerCore(CONFIG, PROFILE)
    writer = JournalWriter(path, CONFIG, PROFILE, **limits)
    script: list[Event] = [StageUp(0, 16)]
    script += [JobArrived(n, 5, 3, service_class="fast") for n in range(num_jobs)]
    script += [IterationDone(n, 0, 50) for n in range(3 * num_jobs)]
    for now_ns, event in enumerate(script):
        writer.record(now_ns, event, core.handle(event, now_ns))
        writer.turn(core)
    writer.close()
    return core


def test_a_journal_carries_its_configuration(tmp_path: Path) -> None:
    _write(tmp_path / "j", 3)
    assert read_header(tmp_path / "j") == (CONFIG, PROFILE)


def test_a_journal_replays(tmp_path: Path) -> None:
    _write(tmp_path / "j", 3)
    result = replay(tmp_path / "j", check=True)
    assert result.divergence is None
    assert result.num_events == 13
    assert result.core.snapshot().finished == 3


LONG = 400


def _write_long(path: Path, **limits: int) -> SchedulerCore:
    """Requests one after the other, so that states stay small and there are several files."""
    core = SchedulerCore(CONFIG, PROFILE)
    writer = JournalWriter(path, CONFIG, PROFILE, max_segment_bytes=10_000, **limits)
    script: list[Event] = [StageUp(0, 16)]
    for job in range(LONG):
        script += [JobArrived(job, 5, 3, service_class="fast"), *(IterationDone(3 * job + n, 0, 50) for n in range(3))]
    for now_ns, event in enumerate(script):
        writer.record(now_ns, event, core.handle(event, now_ns))
        writer.turn(core)
    writer.close()
    return core


def _names(directory: Path) -> list[str]:
    return sorted((path.name for path in directory.iterdir()), key=lambda name: (len(name), name))


def test_a_full_file_is_followed_by_the_next_and_all_of_them_replay(tmp_path: Path) -> None:
    _write_long(tmp_path / "j")
    names = _names(tmp_path)
    assert names == ["j", *(f"j.{n}" for n in range(1, len(names)))]
    assert 3 < len(names) <= 16
    result = replay(tmp_path / "j")
    assert (result.divergence, result.num_events, result.since_ns) == (None, 1 + 4 * LONG, None)


def test_the_oldest_file_goes_and_the_end_replays_to_the_same_state(tmp_path: Path) -> None:
    core = _write_long(tmp_path / "j", max_segments=2)
    names = _names(tmp_path)
    assert len(names) == 2
    assert "j" not in names
    result = replay(tmp_path / "j", check=True)
    assert result.divergence is None
    assert 10 < result.num_events < 4 * LONG
    assert result.since_ns == 1 + 4 * LONG - result.num_events
    assert encode(result.core) == encode(core)
    assert result.core.story(LONG - 1) == core.story(LONG - 1) != ()
    assert result.core.story(0) == core.story(0) != (), "the history of before is in the state"


def test_each_file_replays_by_itself(tmp_path: Path) -> None:
    _write_long(tmp_path / "j")
    for name in _names(tmp_path)[1:]:
        alone = tmp_path / "alone" / name
        alone.parent.mkdir(exist_ok=True)
        alone.write_bytes((tmp_path / name).read_bytes())
        result = replay(alone, check=True)
        assert (result.divergence, result.num_events > 10) == (None, True)


def test_a_file_is_worth_the_state_it_begins_with(tmp_path: Path) -> None:
    """Were it not, a scheduler with many jobs would write down nothing but states."""
    _write_long(tmp_path / "j")
    for name in _names(tmp_path)[:-1]:
        lines = (tmp_path / name).read_bytes().splitlines(keepends=True)
        heads = 1 if name == "j" else 2
        assert sum(map(len, lines[heads:])) >= sum(map(len, lines[:heads]))


def _full_ring(tmp_path: Path) -> tuple[list[Path], ReplayResult]:
    _write_long(tmp_path / "j", max_segments=3)
    files = [tmp_path / name for name in _names(tmp_path)]
    return files, replay(tmp_path / "j")


@pytest.mark.parametrize("part", [0, 0.5, 0.999])
def test_a_crash_while_a_file_is_begun_loses_nothing(tmp_path: Path, part: float) -> None:
    files, whole = _full_ring(tmp_path)
    head = files[-1].read_bytes().splitlines(keepends=True)[:2]
    files[-1].write_bytes(b"".join(head)[: int(part * sum(map(len, head)))])
    result = replay(tmp_path / "j", check=True)
    assert result.divergence is None
    assert result.num_events == sum(1 for _ in read_entries(tmp_path / "j")) < whole.num_events


def test_a_crash_before_the_oldest_file_is_removed_leaves_one_more(tmp_path: Path) -> None:
    _write_long(tmp_path / "j", max_segments=3)
    kept = replay(tmp_path / "j").num_events
    _write_long(tmp_path / "more")
    before = int(_names(tmp_path)[0].removeprefix("j.")) - 1
    (tmp_path / f"more.{before}").rename(tmp_path / f"j.{before}")
    result = replay(tmp_path / "j", check=True)
    assert result.divergence is None
    assert result.num_events > kept


def test_a_hole_is_said_in_a_sentence(tmp_path: Path) -> None:
    files, _ = _full_ring(tmp_path)
    files[1].unlink()
    with pytest.raises(JournalError, match=rf"between {files[0].name} and {files[2].name} files are missing"):
        replay(tmp_path / "j")


def test_a_file_cut_short_before_others_is_said_in_a_sentence(tmp_path: Path) -> None:
    files, _ = _full_ring(tmp_path)
    files[0].write_bytes(files[0].read_bytes()[:-9])
    with pytest.raises(JournalError, match=f"{files[0].name} is cut short, and {files[2].name} goes on"):
        replay(tmp_path / "j")


def test_a_state_of_another_version_is_said_in_a_sentence(tmp_path: Path) -> None:
    files, _ = _full_ring(tmp_path)
    files[0].write_text(files[0].read_text().replace('"high_water"', '"flood"'))
    with pytest.raises(
        JournalError, match=r"a state that this version cannot read: .* Job differs in flood, high_water"
    ):
        replay(tmp_path / "j")


@pytest.mark.parametrize("line", ["[1]", "{", "[1,[],[]]", '[1,["JobAborted"],[]]', "null"])
def test_a_line_that_is_no_event_is_said_in_a_sentence(tmp_path: Path, line: str) -> None:
    _write(tmp_path / "j", 3)
    with (tmp_path / "j").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(JournalError, match="j has a line that is no event"):
        replay(tmp_path / "j")


def test_files_of_the_schema_before_are_read(tmp_path: Path) -> None:
    """They had no states, and the number of the file in the same place."""
    _write_long(tmp_path / "j")
    for name in _names(tmp_path):
        header, *rest = (tmp_path / name).read_text().splitlines(keepends=True)
        old = json.loads(header) | {"journal": 1}
        del old["version"]
        (tmp_path / name).write_text(json.dumps(old) + "\n" + "".join(rest[1:] if old["segment"] else rest))
    result = replay(tmp_path / "j")
    assert (result.divergence, result.num_events) == (None, 1 + 4 * LONG)
    (tmp_path / "j").unlink()
    with pytest.raises(JournalError, match=r"j\.1 begins with no state, and what was before it is missing"):
        replay(tmp_path / "j")


def test_a_full_disk_ends_the_journal_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    core = SchedulerCore(CONFIG, PROFILE)
    writer = JournalWriter(tmp_path / "j", CONFIG, PROFILE)
    writer.close()
    writer._file = Path("/dev/full").open("w")  # noqa: SIM115 - the writer closes it
    writer.record(0, StageUp(0, 16), core.handle(StageUp(0, 16), 0))
    writer.flush()
    assert "cannot write the journal, it ends here" in caplog.text
    writer.record(1, Woke(), core.handle(Woke(), 1))
    writer.turn(core)
    writer.close()


def test_a_new_journal_leaves_nothing_of_an_old_one_when_none_is_kept(tmp_path: Path) -> None:
    _write_long(tmp_path / "j", max_segments=2)
    _write(tmp_path / "j", 2, keep=0)
    assert [path.name for path in tmp_path.iterdir()] == ["j"]


def test_journals_of_earlier_starts_are_kept_and_replay(tmp_path: Path) -> None:
    _write(tmp_path / "j", 1, keep=2)
    _write_long(tmp_path / "j", max_segments=3, keep=2)
    for num_jobs in (2, 3):
        _write(tmp_path / "j", num_jobs, keep=2)
    j, old1, *old2 = _names(tmp_path)
    assert (j, old1, len(old2)) == ("j", "j.old1", 3)
    assert all(name.startswith("j.old2.") for name in old2)
    for name, num_jobs in (("j", 3), ("j.old1", 2), ("j.old2", LONG)):
        result = replay(tmp_path / name, check=True)
        assert (result.divergence, result.core.snapshot().finished) == (None, num_jobs)


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
    with pytest.raises(UnknownEventError, match="unknown event 'Moonrise'"):
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
