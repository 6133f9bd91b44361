"""What the person at the terminal sees: a spinner with the phase on a terminal, plain lines elsewhere.

Progress and the services' lines go to standard error; only the result goes to standard output.
"""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.status import Status


class Reporter:
    def __init__(self) -> None:
        self._errors = Console(stderr=True, highlight=False, soft_wrap=True)
        self._out = Console(highlight=False, soft_wrap=True)
        self._status: Status | None = None

    def phase(self, text: str) -> "Phase":
        """`with reporter.phase("loading"):` shows it, and how long it took when it went well."""
        return Phase(self, text)

    def line(self, text: str, *, style: str = "") -> None:
        self._errors.print(text, style=style or None, markup=False)

    def result(self, text: str) -> None:
        self._out.print(text, markup=False)
        self._out.file.flush()

    def show(self, text: str) -> None:
        if not self._errors.is_terminal:
            self.line(f"{text} ...")
        elif self._status is None:
            self._status = self._errors.status(text, spinner="dots")
            self._status.start()
        else:
            self._status.update(text)

    def hide(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None


class Phase:
    def __init__(self, reporter: Reporter, text: str) -> None:
        self._reporter = reporter
        self._text = text
        self._begin_s = 0.0

    def __enter__(self) -> Self:
        self._begin_s = time.monotonic()
        self._reporter.show(self._text)
        return self

    def detail(self, text: str) -> None:
        self._reporter.show(f"{self._text}: {text}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reporter.hide()
        if error is None:
            self._reporter.line(f"{self._text}: done in {time.monotonic() - self._begin_s:.1f} s")
