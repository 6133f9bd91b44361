"""How a process of ours starts, is told to stop, and ends.

First SIGTERM or SIGINT: `stop` is set and the service shuts down in its written order. Second: exit at once.
A child never outlives its supervisor: the kernel sends it SIGTERM when the parent dies.
"""

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Awaitable, Callable

import uvloop

#: Exit status after a second signal: 128 + SIGINT, as shells report it.
EXIT_FORCED = 130

_PR_SET_PDEATHSIG = 1

#: Set by a supervisor in its children's environment: its process id.
SUPERVISOR_PID_ENV = "FASTSERVE_SUPERVISOR_PID"


def die_with_supervisor() -> None:
    """End with the process named in FASTSERVE_SUPERVISOR_PID, however it ends (Linux; a no-op without the variable)."""
    expected = os.environ.get(SUPERVISOR_PID_ENV)
    if not expected or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(expected):  # it died before the request took effect
        os.kill(os.getpid(), signal.SIGTERM)


def run_service(main: Callable[[asyncio.Event], Awaitable[int | None]]) -> int:
    """Run `main(stop)` on a uvloop loop until it returns; its value is the exit status (None: 0)."""
    die_with_supervisor()

    async def entry() -> int:
        stop = asyncio.Event()

        def on_signal() -> None:
            if stop.is_set():
                os._exit(EXIT_FORCED)
            stop.set()

        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, on_signal)
        return await main(stop) or 0

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(entry())
