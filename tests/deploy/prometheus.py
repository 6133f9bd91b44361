"""A real Prometheus on loopback, and what it answers."""

import contextlib
import json
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from tests.cluster.system import wait_until

Job = dict[str, Any]


@contextlib.contextmanager
def prometheus_server(folder: Path, jobs: Sequence[Job], *, interval: str = "250ms") -> Iterator[str]:
    """Its address, when every target has been scraped twice."""
    scrape = {"global": {"scrape_interval": interval, "scrape_timeout": interval}, "scrape_configs": list(jobs)}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(scrape))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = ["prometheus", f"--web.listen-address={address}", f"--config.file={folder}/prometheus.yml"]
    command += [f"--storage.tsdb.path={folder}/data", "--log.level=error"]
    targets = sum(len(static["targets"]) for job in jobs for static in job["static_configs"])
    with subprocess.Popen(command) as process:
        try:
            _wait_until_scraped_twice(address, process, targets)
            yield address
        finally:
            process.terminate()


def query(address: str, expression: str) -> list[dict[str, Any]]:
    return _ask(address, "query", query=expression)


def query_range(address: str, expression: str, *, start_s: float, end_s: float, step_s: float) -> list[dict[str, Any]]:
    return _ask(address, "query_range", query=expression, start=start_s, end=end_s, step=step_s)


def _ask(address: str, path: str, **parameters: object) -> list[dict[str, Any]]:
    url = f"http://{address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    with urllib.request.urlopen(url, timeout=30) as response:
        return list(json.load(response)["data"]["result"])


def _wait_until_scraped_twice(address: str, process: subprocess.Popen[bytes], targets: int) -> None:
    def scraped() -> bool:
        assert process.poll() is None, "prometheus ended"
        with contextlib.suppress(OSError):  # it does not listen yet
            return len(query(address, "sum_over_time(up[1m]) >= 2")) == targets
        return False

    wait_until(scraped, "prometheus scraped everything twice")
