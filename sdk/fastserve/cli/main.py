"""`fastserve COMMAND`: one table of commands, each in a module of its own that is imported when it is called."""

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from fastserve_common.lifecycle import EXIT_USAGE
from fastserve_common.settings import SettingsError


@dataclass(frozen=True, slots=True)
class Command:
    """`module` has `run(argv) -> int`: its own arguments in, the exit status out."""

    summary: str
    module: str

    def run(self, argv: Sequence[str]) -> int:
        entry: Callable[[Sequence[str]], int] = importlib.import_module(self.module).run
        return entry(argv)


COMMANDS: dict[str, Command] = {
    "serve": Command("start everything that serves a model, on this machine", "fastserve.cli.serve"),
    "profile": Command("measure how long this machine's prefills and decodes take", "fastserve.cli.profile"),
    "generate": Command("generate text from a prompt", "fastserve.cli.generate"),
    "chat": Command("talk to the served model", "fastserve.cli.chat"),
    "top": Command("show what is queued, running and resident now", "fastserve.cli.top"),
    "ctl": Command("see and change a running scheduler: settings, drain, requests", "fastserve.cli.ctl"),
    "key": Command("make an API key and its hash", "fastserve.cli.key"),
    "bench": Command("measure a server under load", "fastserve.cli.bench"),
    "simulate": Command("serve a simulated load on a simulated system", "fastserve.cli.simulate"),
    "replay": Command("run a scheduler's journal again, and tell a request's story", "fastserve.cli.replay"),
}


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if argv else EXIT_USAGE
    if argv[0] in ("-V", "--version"):
        print(f"fastserve {installed_version()}")
        return 0
    command = COMMANDS.get(argv[0])
    if command is None:
        _complain(f"no such command: {argv[0]} (known: {', '.join(COMMANDS)})")
        return EXIT_USAGE
    try:
        return command.run(argv[1:])
    except SettingsError as error:
        _complain(str(error))
        return EXIT_USAGE


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: fastserve [--version] [--help] COMMAND ...",
            "",
            "Preemptive serving of large language models.",
            "",
            "commands:",
            *lines,
            "",
            "`fastserve COMMAND --help` lists the settings of a command.",
        ]
    )


def installed_version() -> str:
    try:
        return version("fastserve")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "unknown"


def _complain(sentence: str) -> None:
    print(f"fastserve: {sentence}", file=sys.stderr)
