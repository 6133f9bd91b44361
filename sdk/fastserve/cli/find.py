"""Finding a cluster that runs on this machine: by its state store, or by the folder `fastserve serve` runs in."""

import fcntl
import os
import tempfile
from pathlib import Path

from fastserve_common.settings import SettingsError
from fastserve_common.state import group_of, open_state


def find_state(state_url: str | None, run_dir: str | None) -> str:
    """The URL of the state store. Raises SettingsError with what to do when there is not exactly one to choose."""
    if state_url is not None:
        file = state_url.removeprefix("sqlite://")
        if file != state_url and not Path(file).exists():  # opening it would make it
            raise SettingsError(f"--state: there is no {file}")
        return state_url
    if run_dir is not None:
        path = Path(run_dir).expanduser().absolute()
        if not (path / "state.db").exists():
            raise SettingsError(f"--run-dir: {run_dir} has no state.db; is `fastserve serve` running there?")
        return _url(path)
    running = live_run_dirs(Path(tempfile.gettempdir()))
    if not running:
        raise SettingsError("no `fastserve serve` found on this machine; say --run-dir, --state or --scheduler")
    if len(running) > 1:
        listed = ", ".join(str(path) for path in running)
        raise SettingsError(f"several `fastserve serve` run on this machine; choose one with --run-dir: {listed}")
    return _url(running[0])


def live_run_dirs(parent: Path) -> list[Path]:
    """Temporary run folders whose lock a live process holds."""
    return [
        path for path in sorted(parent.glob("fastserve-*")) if (path / "state.db").exists() and _is_held(path / "lock")
    ]


def _is_held(lock: Path) -> bool:
    try:
        fd = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # not there, or another user's
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _url(run_dir: Path) -> str:
    return f"sqlite://{run_dir}/state.db"


async def scheduler_addresses(state_url: str) -> dict[str, str]:
    """Of the schedulers that lead now, by group. Raises StateError, or SettingsError for a URL of no known kind."""
    try:
        store = open_state(state_url)
    except ValueError as error:
        raise SettingsError(str(error)) from error
    try:
        members = await store.members("scheduler")
    finally:
        await store.close()
    leaders = {group_of(name): info for name, info in members.items()}
    return {group: info["address"] for group, info in sorted(leaders.items())}
