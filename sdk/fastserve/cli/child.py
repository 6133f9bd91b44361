"""One supervised process: started in a session of its own, watched through a pidfd, ended with all it started."""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from fastserve.cli.follow import Follower
from fastserve.cli.specs import ChildSpec, child_environment


class Child:
    """A process that can be started again. Not before the one before it has ended."""

    def __init__(self, spec: ChildSpec, log_path: Path, log_level: str, show: Callable[[str], None]) -> None:
        self.spec = spec
        self.log_path = log_path
        self._log_level = log_level
        self._show = show
        self._process: subprocess.Popen[bytes] | None = None
        self._follower: Follower | None = None
        self._following: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def running(self) -> bool:
        return self._process is not None and not self._ended.is_set()

    def start(self) -> None:
        """Raises OSError when it cannot be started. Not a coroutine: it cannot be cancelled half-way."""
        with self.log_path.open("ab") as log, (self.spec.stdout_path or self.log_path).open("ab") as out:
            self._process = subprocess.Popen(
                self.spec.argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                env=child_environment(self.spec.environment, os.environ),
                # Ctrl-C reaches the whole group in the foreground; the order of the end is ours to decide.
                start_new_session=True,
            )
        self._ended.clear()
        pidfd = os.pidfd_open(self._process.pid)
        asyncio.get_running_loop().add_reader(pidfd, self._on_end, pidfd)
        if self._follower is None:
            self._follower = Follower(self.log_path, self._log_level, self._show)
            self._following = asyncio.create_task(self._follower.run(), name=f"follow {self.name}")

    def _on_end(self, pidfd: int) -> None:
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        if self._process is not None:
            self._process.wait()
        self._ended.set()

    async def wait(self) -> int:
        """Waits for the end; the exit status, negative for a signal."""
        await self._ended.wait()
        assert self._process is not None
        return self._process.returncode

    async def ended(self) -> str:
        """Waits for the end; says how it came about."""
        return describe_end(await self.wait())

    def last_lines(self) -> list[str]:
        if self._follower is None:
            return []
        while self._follower.catch_up():
            pass
        return list(self._follower.last_lines)

    async def stop(self) -> bool:
        """Ask it to end, and end it when it does not in its time. Whether it ended by itself."""
        if not self.running:
            return True
        self._signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._ended.wait(), self.spec.stop_s)
            return True
        except TimeoutError:
            self._kill_group()
            await self._ended.wait()
            return False

    def kill(self) -> None:
        """End it and everything it started, now, and wait for that. Blocks for as long as the kernel needs."""
        if self._process is not None and self._process.returncode is None:
            self._kill_group()
            self._process.wait()

    async def close(self) -> None:
        """Read the log to its end and let it go."""
        if self._following is not None and self._follower is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
            self._follower.close()
            self._follower = self._following = None

    def _signal(self, signum: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(signum)

    def _kill_group(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def describe_end(returncode: int) -> str:
    if returncode >= 0:
        return f"ended with status {returncode}"
    name = signal.Signals(-returncode).name
    hint = ", most likely for lack of memory" if -returncode == signal.SIGKILL else ""
    return f"was ended by {name}{hint}"
