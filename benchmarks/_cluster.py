"""A served model for the length of a benchmark: started by `fastserve serve`, and gone afterwards whatever happens."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import grpc

from fastserve._http import HttpClient, HttpError
from fastserve.cli.find import scheduler_addresses
from fastserve.v1.scheduler_pb2 import GetStateRequest
from fastserve.v1.scheduler_pb2_grpc import SchedulerStub
from fastserve_common.channels import open_channel
from fastserve_common.lifecycle import SUPERVISOR_PID_ENV
from fastserve_common.state import StateError, open_state

#: Preparing, loading and profiling a small model on two cores takes about a minute; a first download takes longer.
START_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 45.0
POLL_S = 0.5
LOG_LINES = 15


class ClusterError(RuntimeError):
    """It did not start; the message has the end of its log."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """`http` and `grpc`: host:port. `state_url`: for looking at the scheduler."""

    http: str
    grpc: str
    state_url: str


@contextlib.contextmanager
def cluster(model: str, flags: Sequence[str], *, start_timeout_s: float = START_TIMEOUT_S) -> Iterator[Cluster]:
    """Serve `model` with these flags of `fastserve serve`. Raises ClusterError.

    SIGTERM to this process becomes SystemExit, so that the end of the block runs; if even that is skipped, the kernel
    tells `serve` that its starter died.
    """
    previous = signal.signal(signal.SIGTERM, _exit)
    try:
        with tempfile.TemporaryDirectory(prefix="fastserve-bench-") as folder:
            process = _start(model, flags, Path(folder))
            try:
                yield _wait_ready(process, Path(folder), start_timeout_s)
            finally:
                _stop(process)
    finally:
        signal.signal(signal.SIGTERM, previous)


def _exit(_signum: int, _frame: FrameType | None) -> None:
    sys.exit(128 + signal.SIGTERM)


def _start(model: str, flags: Sequence[str], run_dir: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "fastserve.cli", "serve", model, "--port", "0", "--grpc-port", "0"]
    with (run_dir / "serve.log").open("wb") as log:
        return subprocess.Popen(
            [*command, "--run-dir", str(run_dir), *flags],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, SUPERVISOR_PID_ENV: str(os.getpid())},
            start_new_session=True,
        )


def _wait_ready(process: subprocess.Popen[bytes], run_dir: Path, timeout_s: float) -> Cluster:
    deadline_s = time.monotonic() + timeout_s
    state_url = f"sqlite://{run_dir}/state.db"
    while process.poll() is None and time.monotonic() < deadline_s:
        found = asyncio.run(_ready_gateway(state_url)) if (run_dir / "state.db").exists() else None
        if found is not None:
            return Cluster(found["http"], found["grpc"], state_url)
        time.sleep(POLL_S)
    lines = (run_dir / "serve.log").read_text(errors="replace").splitlines()
    what = "ended" if process.poll() is not None else f"was not ready within {timeout_s:g} s"
    raise ClusterError("\n".join([f"`fastserve serve` {what}:", *lines[-LOG_LINES:]]))


async def _ready_gateway(state_url: str) -> dict[str, str] | None:
    """The registered gateway, once it says that the cluster is ready."""
    try:
        state = open_state(state_url)
        try:
            members = await state.members("gateway")
        finally:
            await state.close()
        for info in members.values():
            http = HttpClient(f"http://{info['http']}")
            try:
                if (await http.send(http.payload("GET", "/health/ready"))).ok:
                    return info
            finally:
                await http.close()
    except (StateError, HttpError):
        return None
    return None


def num_preemptions(where: Cluster) -> int:
    """Since the scheduler started. Raises ClusterError when it does not answer."""

    async def ask() -> int:
        addresses = await scheduler_addresses(where.state_url)
        if not addresses:
            raise ClusterError("no scheduler is registered")
        (address,) = addresses.values()
        async with open_channel(address) as channel:
            state = await SchedulerStub(channel).GetState(GetStateRequest(), timeout=10)
        return state.preemptions

    try:
        return asyncio.run(ask())
    except (StateError, grpc.RpcError) as error:
        raise ClusterError(f"the scheduler does not answer: {error}") from error


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask, insist, and at last kill the whole group, so that no stage is left behind."""
    for _ in range(2):
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
