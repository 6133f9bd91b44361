"""Every panel over a real Prometheus that scrapes a real cluster under load, plotted for people to look at."""

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
from tests.cluster.system import System, wait_until
from tests.cluster.words import write_words
from tests.conftest import free_ports

from fastserve import Client, FastServeError

from .prometheus import prometheus_server, query, query_range
from .test_grafana import FILES, dashboard, panels

mpl.use("Agg")
from matplotlib import pyplot as plt

pytestmark = pytest.mark.infra

METRICS_PORT = free_ports(4)
#: Where to leave pictures for people to look at, and how much of the load they show at least.
PICTURES_ENV = "FASTSERVE_PICTURES"
PICTURED_S = 40.0
#: For everything to have happened once, on any machine.
PATIENCE_S = 300.0
#: Nothing of the kind happens here: no copy fails, and nobody is refused.
EMPTY = {"Failed copies, last 5 minutes", "Refused per second"}

Series = list[dict[str, Any]]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, need: Callable[[str], None]) -> Iterator[tuple[str, float]]:
    """A Prometheus that has seen a cluster of fake stages swap, lose a stage and recover; and since when."""
    need("prometheus")
    folder = tmp_path_factory.mktemp("live")
    words = write_words(folder / "words")
    flags = ["--fake", "--port=0", "--host-kv-memory=4MiB", "--kv-memory=2MiB", "--max-model-len=2048"]
    flags += ["--fake-iteration-ms=5", f"--metrics-port={METRICS_PORT}", f"--profile-dir={folder}/profiles"]
    system = System(folder / "system", str(words), *flags)
    try:
        system.wait_ready()
        targets = {
            "fastserve-gateway": [system.http],
            "fastserve-scheduler": [f"127.0.0.1:{METRICS_PORT}"],
            "fastserve-kvstore": [f"127.0.0.1:{METRICS_PORT + 1}"],
            "fastserve-stage": [f"127.0.0.1:{METRICS_PORT + 2 + stage}" for stage in range(2)],
        }
        jobs = [{"job_name": job, "static_configs": [{"targets": where}]} for job, where in targets.items()]
        begun_s = time.time()
        with prometheus_server(folder, jobs, interval="1s") as address:
            run_load(system, address, begun_s)
            yield address, begun_s
    finally:
        system.destroy()


def run_load(system: System, address: str, begun_s: float) -> None:
    """Until every panel has something to draw."""
    over = threading.Event()
    callers = [threading.Thread(target=call, args=(system, seed, over), daemon=True) for seed in range(24)]
    for caller in callers:
        caller.start()
    try:
        wait_until(lambda: bool(query(address, 'fastserve:swaps_total{direction="in"} > 0')), "it swaps", system)
        system.service("fastserve_worker", "--stage=1").kill()
        least_s = PICTURED_S if PICTURES_ENV in os.environ else 0.0
        over.wait(least_s)
        while missing := nothing_to_draw(address, begun_s):
            assert time.time() - begun_s < PATIENCE_S, f"nothing to draw in {missing}"
    finally:
        over.set()
        for caller in callers:
            caller.join(60)


def nothing_to_draw(address: str, begun_s: float) -> set[str]:
    """Panels that are still empty."""
    asked = {panel["title"]: panel["targets"] for path in FILES for panel in panels(path)}
    empty = {
        title
        for title, targets in asked.items()
        if not any(has_values(ask(address, target["expr"], begun_s, time.time())) for target in targets)
    }
    return empty - EMPTY


def call(system: System, seed: int, over: threading.Event) -> None:
    draw = random.Random(seed)
    with system.client() as client:
        while not over.is_set():
            prompt = [draw.randrange(1, 1000) for _ in range(draw.randrange(5, 200))]
            tokens = min(1500, int(draw.paretovariate(0.9) * 12))
            try:
                follow(client, prompt, tokens, over)
            except FastServeError:
                over.wait(0.5)


def follow(client: Client, prompt: list[int], tokens: int, over: threading.Event) -> None:
    for _ in client.stream(prompt, max_tokens=tokens, temperature=0, ignore_eos=True):
        if over.is_set():
            return


@pytest.mark.timeout(400)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_panel_draws_something(path: Path, measured: tuple[str, float], tmp_path: Path) -> None:
    address, begun_s = measured
    end_s = time.time()
    drawn: dict[str, list[tuple[str, Series]]] = {}
    for panel in panels(path):
        drawn[panel["title"]] = [
            (target["legendFormat"], ask(address, target["expr"], begun_s, end_s)) for target in panel["targets"]
        ]
    folder = Path(os.environ.get(PICTURES_ENV, tmp_path))
    picture = folder / f"{path.stem}.png"
    plot(dashboard(path)["title"], drawn, picture)
    assert picture.stat().st_size > 10_000
    empty = {title for title, targets in drawn.items() if not any(has_values(series) for _, series in targets)}
    assert empty <= EMPTY


def ask(address: str, expression: str, start_s: float, end_s: float) -> Series:
    expression = expression.replace("$__rate_interval", "5s")
    return query_range(address, expression, start_s=start_s, end_s=end_s, step_s=1)


def has_values(series: Series) -> bool:
    return any(value != "NaN" for one in series for _, value in one["values"])


def plot(title: str, drawn: dict[str, list[tuple[str, Series]]], picture: Path) -> None:
    columns = 3
    rows = -(-len(drawn) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(6 * columns, 3 * rows), squeeze=False)
    for axis in axes.flat[len(drawn) :]:
        axis.axis("off")
    for axis, (name, targets) in zip(axes.flat, drawn.items(), strict=False):
        axis.set_title(name, fontsize=9)
        axis.grid(alpha=0.3)
        for legend, series in targets:
            for one in series:
                plot_one(axis, legend, one)
        if axis.lines and len(axis.lines) <= 12:
            axis.legend(fontsize=6, loc="upper left")
    figure.suptitle(title)
    figure.subplots_adjust(left=0.04, right=0.99, bottom=0.04, top=0.95, hspace=0.35)
    figure.savefig(picture, dpi=70)
    plt.close(figure)


def plot_one(axis: Any, legend: str, one: dict[str, Any]) -> None:  # noqa: ANN401 - matplotlib's axis
    for label, value in one["metric"].items():
        legend = legend.replace("{{" + label + "}}", value)
    begun_s = one["values"][0][0]
    times_s, values = zip(*((at_s - begun_s, float(value)) for at_s, value in one["values"]), strict=True)
    axis.plot(times_s, values, label=legend or "value")
