"""A real Redis of a test's own, to be killed, frozen, emptied and locked."""

import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import redis

PATIENCE_S = 30.0


class RedisProcess:
    """Nothing is saved: one that is started again is empty. `flags` are those of redis-server."""

    def __init__(self, binary: str, folder: Path, port: int, *, flags: Sequence[str] = (), url: str = "") -> None:
        self.url = url or f"redis://127.0.0.1:{port}/0"
        self._command = [binary, "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
        self._command += list(flags) or ["--port", str(port)]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._process is not None:
            self.thaw()
            self.kill()

    def start(self) -> None:
        """Returns when it answers."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        deadline_s = time.monotonic() + PATIENCE_S
        with redis.Redis.from_url(self.url) as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.ConnectionError:
                    if time.monotonic() > deadline_s:
                        raise
                    time.sleep(0.01)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        """It keeps its connections and says nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def wipe(self) -> None:
        """Everything is forgotten, at once, while everybody is connected."""
        with redis.Redis.from_url(self.url) as client:
            client.flushall()
