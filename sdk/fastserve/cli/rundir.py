"""Where a run keeps its state and logs: a temporary folder that goes with it, or a given one that stays."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from fastserve_common.settings import SettingsError

_PREFIX = "fastserve-"
_STATE_FILES = ("state.db", "state.db-wal", "state.db-shm")


@dataclass(slots=True)
class RunDir:
    path: Path
    temporary: bool
    _lock_fd: int

    @classmethod
    def open(cls, given: Path | None) -> "RunDir":
        """Raises SettingsError when it cannot be used or another run is using it."""
        if given is None:
            remove_abandoned(Path(tempfile.gettempdir()))
        try:
            path = Path(tempfile.mkdtemp(prefix=_PREFIX)) if given is None else given.expanduser().absolute()
            (path / "logs").mkdir(parents=True, exist_ok=True)
            lock_fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SettingsError(f"--run-dir: cannot use {given}: {error.strerror}") from error
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock_fd)
            raise SettingsError(f"--run-dir: {path} is in use by another fastserve") from error
        for name in _STATE_FILES:  # members of an earlier run are not ours
            (path / name).unlink(missing_ok=True)
        return cls(path, given is None, lock_fd)

    @property
    def state_url(self) -> str:
        return f"sqlite://{self.path}/state.db"

    def log_path(self, child: str) -> Path:
        return self.path / "logs" / f"{child}.log"

    def close(self) -> None:
        """Remove it when it is temporary. Harmless when repeated."""
        if self.temporary:
            shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self._lock_fd)
        self._lock_fd = -1


def remove_abandoned(parent: Path) -> list[Path]:
    """Remove temporary run folders whose run was killed: it held a lock that nobody holds now."""
    removed: list[Path] = []
    for path in sorted(parent.glob(_PREFIX + "*")):
        try:
            lock_fd = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # not a run folder, or another user's
            continue
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if (path / "state.db").exists():  # one without is being made
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path)
        except BlockingIOError:
            pass  # it lives
        finally:
            os.close(lock_fd)
    return removed
