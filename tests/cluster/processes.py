"""Services as an orchestrator would start them: apart, each by its own flags and with its own end."""

import os
import subprocess
from pathlib import Path

from fastserve.cli import specs


class Processes:
    """`folder`: for what they say."""

    def __init__(self, folder: Path) -> None:
        self._logs = folder
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, spec: specs.ChildSpec, *flags: str, log: str = "") -> subprocess.Popen[bytes]:
        """With more flags; the last one of a name counts."""
        environment = specs.child_environment(spec.environment, os.environ)
        with (self._logs / f"{log or spec.name}.log").open("ab") as output:
            process = subprocess.Popen([*spec.argv, *flags], stdout=output, stderr=output, env=environment)
        self._started.append(process)
        return process

    def said(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(self._logs.glob("*.log")))

    def destroy(self) -> None:
        """Whatever still runs, frozen or not."""
        for process in self._started:
            process.kill()
            process.wait()
