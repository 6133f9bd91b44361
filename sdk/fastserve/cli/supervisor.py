"""Keeps a set of processes running: starts them in groups, restarts what dies, ends them in order, leaves nothing."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from fastserve.cli.child import Child, describe_end
from fastserve.cli.readiness import registered
from fastserve.cli.reporter import Reporter
from fastserve.cli.specs import ChildSpec
from fastserve_common import segments
from fastserve_common.state import StateStore

#: A process that dies more often than this within the window is given up, and the system with it.
MAX_RESTARTS = 5
RESTART_WINDOW_S = 60.0

#: The first restart in a window comes at once; the wait doubles from here with each further one.
RESTART_BACKOFF_S = 0.5
MAX_RESTART_BACKOFF_S = 8.0

T = TypeVar("T")


class StartError(Exception):
    """The system could not be started, or could not be kept running. A sentence and the log that explains it."""


class StoppedError(Exception):
    """Told to stop while starting."""


class Restarts:
    """When a process that died may be started again. Pure: time is an argument."""

    def __init__(self) -> None:
        self._times_s: deque[float] = deque()

    def next_delay_s(self, now_s: float) -> float | None:
        """Seconds to wait; None when it has died too often."""
        while self._times_s and self._times_s[0] <= now_s - RESTART_WINDOW_S:
            self._times_s.popleft()
        if len(self._times_s) >= MAX_RESTARTS:
            return None
        recent = len(self._times_s)
        self._times_s.append(now_s)
        return min(MAX_RESTART_BACKOFF_S, RESTART_BACKOFF_S * 2 ** (recent - 1)) if recent else 0.0


class Supervisor:
    """`log_path` gives each child its log file. Children that were started are ended in reverse order."""

    def __init__(
        self,
        state: StateStore,
        reporter: Reporter,
        log_path: Callable[[str], Path],
        log_level: str,
        stop: asyncio.Event,
    ) -> None:
        self.children: list[list[Child]] = []
        self._state = state
        self._reporter = reporter
        self._log_path = log_path
        self._log_level = log_level
        self._stop = stop

    def start(self, *specs: ChildSpec) -> None:
        """Start a group; its members end together, after the groups started later."""
        group: list[Child] = []
        self.children.append(group)
        for spec in specs:
            child = self._make(spec)
            child.start()
            group.append(child)

    async def run_to_end(self, spec: ChildSpec) -> None:
        """Run a process that ends by itself. Raises StartError when it fails or any child ends before it."""
        child = self._make(spec)
        self.children.append([child])
        child.start()
        status = await self.unless_dead(child.wait(), besides=child)
        if status != 0:
            raise StartError(_post_mortem(child, f"{child.name} {describe_end(status)}"))
        self.children.remove([child])
        await child.close()

    async def until_registered(self, *specs: ChildSpec) -> list[Mapping[str, str]]:
        """What they say of themselves. Raises StartError when any child ends, StoppedError when told to stop."""
        return await self.unless_dead(asyncio.gather(*(registered(self._state, spec) for spec in specs)))

    async def unless_dead(self, work: Awaitable[T], besides: Child | None = None) -> T:
        """The result of `work`, unless a child ends (StartError) or `stop` is set (StoppedError) before."""
        task = asyncio.ensure_future(work)
        stopped = asyncio.create_task(self._stop.wait())
        deaths = {asyncio.create_task(child.ended()): child for child in self._all() if child is not besides}
        try:
            done, _ = await asyncio.wait([task, stopped, *deaths], return_when=asyncio.FIRST_COMPLETED)
            if task in done:
                return task.result()
            for death, child in deaths.items():
                if death in done and not self._stop.is_set():
                    raise StartError(_post_mortem(child, f"{child.name} {death.result()} while starting"))
            raise StoppedError
        finally:
            for other in (task, stopped, *deaths):
                other.cancel()
            await asyncio.gather(task, stopped, *deaths, return_exceptions=True)

    async def watch(self) -> None:
        """Restart what dies, until `stop` is set. Raises StartError when something dies too often."""
        keepers = [asyncio.create_task(self._keep(child), name=f"keep {child.name}") for child in self._all()]
        stopped = asyncio.create_task(self._stop.wait())
        try:
            done, _ = await asyncio.wait([stopped, *keepers], return_when=asyncio.FIRST_COMPLETED)
            for task in done & set(keepers):
                task.result()
        finally:
            for task in (stopped, *keepers):
                task.cancel()
            await asyncio.gather(stopped, *keepers, return_exceptions=True)

    async def stop_all(self) -> None:
        """The orderly end: groups in reverse order, members of a group together."""
        for group in reversed(self.children):
            ended = await asyncio.gather(*(child.stop() for child in group))
            for child, in_time in zip(group, ended, strict=True):
                if not in_time:
                    self._reporter.line(f"{child.name} did not end in {child.spec.stop_s:.0f} s and was killed")
        for child in self._all():
            await child.close()
        segments.sweep()

    def kill_all(self) -> None:
        """The end at once: everything is killed, and what the killed could not remove is removed."""
        for child in self._all():
            child.kill()
        segments.sweep()

    async def _keep(self, child: Child) -> None:
        restarts = Restarts()
        while True:
            how = await child.ended()
            delay_s = restarts.next_delay_s(time.monotonic())
            if delay_s is None:
                times = f"{MAX_RESTARTS} restarts within {RESTART_WINDOW_S:.0f} s"
                raise StartError(_post_mortem(child, f"{child.name} {how} after {times}; giving up"))
            self._reporter.line(f"{child.name} {how}; starting it again", style="yellow")
            await asyncio.sleep(delay_s)
            try:
                child.start()
            except OSError as error:
                raise StartError(f"{child.name} cannot be started again: {error}") from error

    def _all(self) -> Sequence[Child]:
        return [child for group in self.children for child in group]

    def _make(self, spec: ChildSpec) -> Child:
        return Child(spec, self._log_path(spec.name), self._log_level, self._prefixed(spec.name))

    def _prefixed(self, name: str) -> Callable[[str], None]:
        return lambda line: self._reporter.line(line if line.startswith("{") else f"[{name}] {line}")


def _post_mortem(child: Child, sentence: str) -> str:
    lines = [f"  {line}" for line in child.last_lines() if line.strip()]
    said = [f"its last words ({child.log_path}):", *lines] if lines else [f"it wrote nothing to {child.log_path}"]
    return "\n".join([sentence, *said])
