"""A served model's metrics, as its benchmarks read them: scraped before and after, and what went up meanwhile."""

import contextlib
import random
import socket
import urllib.request
from collections.abc import Mapping

from _cluster import ClusterError

Metrics = Mapping[str, float]
"""Samples of a scrape by name and labels, as Prometheus prints them."""


def free_ports(count: int) -> int:
    """The first of `count` ports in a row that nobody listens on, below those that the kernel gives to clients."""
    for first in random.sample(range(20_000, 30_000, count), 100):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise ClusterError("no free ports")


def scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return parse(answer.read().decode())


def parse(text: str) -> dict[str, float]:
    """A scrape in Prometheus's text format."""
    lines = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
    return {key: float(value) for key, _, value in lines}


def difference(after: Metrics, before: Metrics) -> dict[str, float]:
    return {key: value - before.get(key, 0.0) for key, value in after.items()}


def total(metrics: Metrics, name: str, label: str = "") -> float:
    """Sum over the samples of that name that have the label."""
    return sum(value for key, value in metrics.items() if key.split("{")[0] == name and label in key)
