"""Following a log: what is shown, what is kept, and that it cannot grow for ever."""

import logging
from pathlib import Path

import pytest

from fastserve.cli import follow
from fastserve.cli.follow import LAST_LINES, Follower, line_level

INFO_LINE = "12:00:00 INFO    worker: loaded"
ERROR_LINE = "12:00:01 ERROR   worker: broken"
TRACEBACK = "Traceback (most recent call last):"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "child.log"
    path.touch()
    return path


def follower(path: Path, level: str = "warning") -> tuple[Follower, list[str]]:
    shown: list[str] = []
    return Follower(path, level, shown.append), shown


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_lines_at_the_level_and_above_are_shown_with_what_belongs_to_them(path: Path) -> None:
    reader, shown = follower(path)
    append(path, f"a bare word\n{INFO_LINE}\nof several lines\n{ERROR_LINE}\n{TRACEBACK}\n{INFO_LINE}\n")
    while reader.catch_up():
        pass
    assert shown == ["a bare word", ERROR_LINE, TRACEBACK]
    assert list(reader.last_lines)[-2:] == [TRACEBACK, INFO_LINE]
    reader.close()


def test_a_line_is_shown_once_it_is_whole_or_the_child_is_gone(path: Path) -> None:
    reader, shown = follower(path)
    append(path, "half")
    reader.catch_up()
    assert shown == []
    append(path, " a line\nthe last wor")
    reader.catch_up()
    assert shown == ["half a line"]
    reader.close()
    assert shown == ["half a line", "the last wor"]


def test_only_the_last_lines_are_kept(path: Path) -> None:
    reader, _ = follower(path)
    append(path, "".join(f"line {i}\n" for i in range(100)))
    reader.close()
    assert list(reader.last_lines) == [f"line {i}" for i in range(100 - LAST_LINES, 100)]


def test_a_log_that_is_full_is_moved_aside(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "MAX_LOG_BYTES", 1000)
    reader, shown = follower(path)
    for i in range(60):
        append(path, f"line {i:03} {'x' * 40}\n")
        while reader.catch_up():
            pass
    assert path.stat().st_size < 1100
    assert path.with_suffix(".1.log").stat().st_size < 1100
    assert len(shown) == 60, "moving it aside loses nothing that was read"
    reader.close()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (INFO_LINE, logging.INFO),
        (ERROR_LINE, logging.ERROR),
        ('{"level": "error", "message": "x"}', logging.ERROR),
        ('{"level": "debug"}', logging.DEBUG),
        ("{not json", logging.WARNING),
        ("ERROR at the start is no level", logging.WARNING),
        ("", logging.WARNING),
    ],
)
def test_the_level_of_a_line(line: str, expected: int) -> None:
    assert line_level(line, logging.WARNING) == expected
