"""Following a child's log: its last lines for a post-mortem, and the ones worth showing as they come.

Children write straight to their files, so that a slow terminal never makes a service wait.
"""

import asyncio
import json
import logging
import os
import shutil
from collections import deque
from collections.abc import Callable
from pathlib import Path

#: A log that reaches this size is moved aside; one earlier piece is kept.
MAX_LOG_BYTES = 64 * 1024 * 1024

#: Lines kept to explain a death.
LAST_LINES = 12

_POLL_S = 0.1
_READ_BYTES = 256 * 1024
_LEVELS = {"DEBUG": 10, "INFO": 20, "WARNING": 30, "ERROR": 40, "CRITICAL": 50}


class Follower:
    """Reads what is appended to `path` and hands lines at `level` or above to `show`."""

    def __init__(self, path: Path, level: str, show: Callable[[str], None]) -> None:
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._path = path
        self._threshold = logging.getLevelNamesMapping()[level.upper()]
        self._show = show
        self._file = path.open("rb")
        self._partial = b""
        self._level = logging.WARNING

    async def run(self) -> None:
        while True:
            if not self.catch_up():
                await asyncio.sleep(_POLL_S)

    def catch_up(self) -> bool:
        """Whether anything was there to read."""
        data = self._file.read(_READ_BYTES)
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            self._take(line.decode(errors="replace"))
        if not data and self._file.tell() >= MAX_LOG_BYTES:
            self._move_aside()
        return bool(data)

    def close(self) -> None:
        while self.catch_up():
            pass
        if self._partial:
            self._take(self._partial.decode(errors="replace"))
        self._file.close()

    def _take(self, line: str) -> None:
        self.last_lines.append(line)
        self._level = line_level(line, self._level)
        if self._level >= self._threshold:
            self._show(line)

    def _move_aside(self) -> None:
        """The child appends, so its next line lands at the start of the emptied file."""
        shutil.copyfile(self._path, self._path.with_suffix(".1.log"))
        os.truncate(self._path, 0)
        self._file.seek(0)


def line_level(line: str, previous: int) -> int:
    """The level of a log line, human or JSON; a line without one (a traceback's) belongs to the line before."""
    if line.startswith("{"):
        try:
            name = str(json.loads(line).get("level", "")).upper()
        except ValueError:
            return previous
    else:
        words = line.split(None, 2)
        name = words[1] if len(words) > 1 and len(words[0]) == 8 else ""
    return _LEVELS.get(name, previous)
