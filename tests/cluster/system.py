"""A whole system as `fastserve serve` starts it, in real processes, for tests to use and to break."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from fastserve import Client
from fastserve_common.segments import PREFIX, SHM_DIR

#: Enough for a slow machine under load; every wait ends with its condition, not with this.
PATIENCE_S = 100.0

ANNOUNCED = "Ctrl-C stops it."


class System:
    """`fastserve serve ARGS` as a child, leader of a group of its own as a shell would start it."""

    def __init__(self, folder: Path, *args: str, env: dict[str, str] | None = None) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "fastserve.cli", "serve", *args]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "TMPDIR": str(folder), **(env or {})},
        )
        self.said = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._known: dict[int, psutil.Process] = {}

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.said += line

    def wait_said(self, text: str) -> None:
        wait_until(lambda: text in self.said or self.process.poll() is not None, f"it says {text!r}", self)
        assert text in self.said, self.said

    def wait_ready(self) -> None:
        self.wait_said(ANNOUNCED)
        self.note_processes()

    def note_processes(self) -> list[psutil.Process]:
        """Remember every process of the system, so that none can hide when its parent is gone."""
        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            found = []
        self._known.update({process.pid: process for process in found})
        return found

    @property
    def http(self) -> str:
        return self._announced(r"HTTP  https?://(\S+)/v1")

    @property
    def grpc(self) -> str:
        return self._announced(r"gRPC  (\S+)")

    def _announced(self, pattern: str) -> str:
        match = re.search(pattern, self.said)
        assert match, self.said
        return match[1]

    def client(self) -> Client:
        return Client(self.grpc, timeout_s=PATIENCE_S)

    def service(self, module: str, *flags: str) -> psutil.Process:
        """The running process of a service, such as `fastserve_worker` with `--stage=1`."""
        found: list[psutil.Process] = []

        def look() -> bool:
            found[:] = [
                process
                for process in self.note_processes()
                if (line := command_line(process)) and module in line and all(flag in line for flag in flags)
            ]
            return len(found) == 1

        wait_until(look, f"one {module} {' '.join(flags)} runs", self)
        return found[0]

    def signal(self, signum: signal.Signals) -> None:
        """To the whole group, as a terminal's Ctrl-C."""
        os.killpg(self.process.pid, signum)

    def wait(self) -> int:
        try:
            status = self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end: {self.said}") from None
        self._reader.join(PATIENCE_S)
        return status

    def stop(self) -> int:
        self.note_processes()
        self.signal(signal.SIGINT)
        return self.wait()

    def assert_nothing_left(self) -> None:
        """No process, no shared memory, no files."""
        wait_until(lambda: not self.living(), "its processes end", self)
        left = [path.name for path in SHM_DIR.glob(PREFIX + "*") if int(path.name.split("-")[2]) in self._known]
        assert left == []

    def living(self) -> list[psutil.Process]:
        return [p for p in self._known.values() if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    def destroy(self) -> None:
        """For the end of a test that failed."""
        self.note_processes()
        self.process.kill()
        self.process.wait()
        for process in self.living():
            process.kill()
        self._reader.join(PATIENCE_S)
        for path in SHM_DIR.glob(PREFIX + "*"):
            if int(path.name.split("-")[2]) in self._known:
                path.unlink(missing_ok=True)


def command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def wait_until(condition: Callable[[], bool], what: str, system: System | None = None) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE_S:.0f} s: {what}\n{system.said if system else ''}"
        time.sleep(0.02)
