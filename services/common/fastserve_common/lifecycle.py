"""How a process of ours starts, is told to stop, and ends.

First SIGTERM, SIGINT or SIGHUP: `stop` is set and the service shuts down in its written order. Second: exit at once.
A child never outlives its supervisor: the kernel sends it SIGTERM when the parent dies, and what has not ended some
seconds later ends itself.
"""

import asyncio
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable

import uvloop

#: Exit status after a second signal: 128 + SIGINT, as shells report it.
EXIT_FORCED = 130
#: Exit status for settings that cannot be used.
EXIT_USAGE = 2

#: A child whose supervisor is gone has this long for its orderly shutdown.
ORPHAN_GRACE_S = 5.0

_PR_SET_PDEATHSIG = 1

#: Set by a supervisor in its children's environment: its process id.
SUPERVISOR_PID_ENV = "FASTSERVE_SUPERVISOR_PID"


def die_with_supervisor() -> None:
    """End with the process named in FASTSERVE_SUPERVISOR_PID, however it ends (Linux; a no-op without the variable)."""
    expected = os.environ.get(SUPERVISOR_PID_ENV)
    if not expected or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if _is_orphan():  # it died before the request took effect
        os.kill(os.getpid(), signal.SIGTERM)


def _is_orphan() -> bool:
    expected = os.environ.get(SUPERVISOR_PID_ENV)
    return bool(expected) and os.getppid() != int(expected or 0)


def _end_soon_if_orphan() -> None:
    """A drain must not keep an orphan alive: nobody is left to lose patience with it."""
    if _is_orphan():
        timer = threading.Timer(ORPHAN_GRACE_S, os._exit, [EXIT_FORCED])
        timer.daemon = True
        timer.start()


def run_service(
    main: Callable[[asyncio.Event], Awaitable[int | None]], *, on_force: Callable[[], None] | None = None
) -> int:
    """Run `main(stop)` on a uvloop loop until it returns; its value is the exit status (None: 0).

    `on_force` runs, on the loop's thread, right before the exit that a second signal asks for.
    """

    async def entry() -> int:
        stop = asyncio.Event()

        def on_signal() -> None:
            if stop.is_set():
                if on_force is not None:
                    on_force()
                os._exit(EXIT_FORCED)
            stop.set()
            _end_soon_if_orphan()

        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(signum, on_signal)
        die_with_supervisor()
        return await main(stop) or 0

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(entry())
