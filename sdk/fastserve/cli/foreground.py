"""Commands whose work is a service's: that module in a process of its own, in the foreground."""

import subprocess
import sys
from collections.abc import Sequence
from typing import NoReturn

from fastserve.cli.arguments import EXIT_INTERRUPTED


def run_module(module: str, argv: Sequence[str]) -> int:
    """Its exit status. Input, output, errors and Ctrl-C are the module's own."""
    command = [sys.executable, "-m", module, *argv]
    if "-h" in argv or "--help" in argv:
        _explain(command)
    with subprocess.Popen(command) as process:
        while True:
            try:
                status = process.wait()
                break
            except KeyboardInterrupt:
                continue  # it reached the module too, which decides when to end
    return status if status >= 0 else EXIT_INTERRUPTED


def _explain(command: Sequence[str]) -> NoReturn:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, end="")
    raise SystemExit(done.returncode)
