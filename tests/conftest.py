"""Fixtures shared by every suite."""

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings

#: Under CI=true a missing tool is a failure, not a skip: what CI did not run, it did not check.
IN_CI = os.environ.get("CI") == "true"

#: No test is about speed: on a slow machine an example may take what it takes.
hypothesis_settings.register_profile(
    "untimed",
    hypothesis_settings.get_profile("ci" if IN_CI else "default"),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
hypothesis_settings.load_profile("untimed")

#: One thread per process: the suites run many processes on few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A run that a shell put into the background ignores Ctrl-C, and so would everything it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _skip_or_fail(reason: str) -> None:
    if IN_CI:
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def skip_or_fail() -> Callable[[str], None]:
    """For a tool that is missing: `skip_or_fail("redis-server is not installed")`."""
    return _skip_or_fail


def free_ports(count: int) -> int:
    """The first of `count` ports in a row that nobody listens on, below those that the kernel gives to clients: they
    are still free a moment later."""
    for first in random.sample(range(20_000, 32_000, count), 100):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise AssertionError("no free ports")


def free_port() -> int:
    return free_ports(1)


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real Redis: $REDIS_URL, or one started for this session."""
    if url := os.environ.get("REDIS_URL"):
        yield url
        return
    binary = shutil.which("redis-server")
    if binary is None:
        _skip_or_fail("redis-server is not installed")
        return
    port = free_port()
    folder: Path = tmp_path_factory.mktemp("redis")
    command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        url = f"redis://127.0.0.1:{port}/0"
        _wait_for_redis(url)
        yield url
        process.terminate()


@pytest.fixture
def redis_url(redis_server: str) -> str:
    """An empty database of a real Redis."""
    with redis.Redis.from_url(redis_server) as client:
        client.flushdb()
    return redis_server


def _wait_for_redis(url: str) -> None:
    deadline = time.monotonic() + 15
    with redis.Redis.from_url(url) as client:
        while True:
            try:
                client.ping()
                return
            except redis.ConnectionError:
                if time.monotonic() > deadline:
                    raise
