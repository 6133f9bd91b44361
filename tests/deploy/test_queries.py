"""Every panel's query, asked of a real Prometheus that scrapes what the services expose."""

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from .exposed import expositions
from .prometheus import prometheus_server, query
from .test_grafana import FILES, panels

pytestmark = pytest.mark.infra

#: Panels of what this cluster, which has no kvstore attached, does not have.
EMPTY = {"KV on the host"}


class _Target(BaseHTTPRequestHandler):
    """Answers `/JOB` with the exposition of that job."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(expositions()[self.path[1:]])

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads it."""


@pytest.fixture(scope="module")
def targets() -> Iterator[int]:
    expositions()
    with ThreadingHTTPServer(("127.0.0.1", 0), _Target) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def prometheus(targets: int, tmp_path_factory: pytest.TempPathFactory, need: Callable[[str], None]) -> Iterator[str]:
    """Its address, when every target has been scraped twice."""
    need("prometheus")
    jobs = [
        {"job_name": job, "metrics_path": f"/{job}", "static_configs": [{"targets": [f"127.0.0.1:{targets}"]}]}
        for job in expositions()
    ]
    with prometheus_server(tmp_path_factory.mktemp("prometheus"), jobs) as address:
        yield address


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_panel_has_something_to_draw(path: Path, prometheus: str) -> None:
    empty = set()
    for panel in panels(path):
        for target in panel["targets"]:
            if not query(prometheus, target["expr"].replace("$__rate_interval", "30s")):
                empty.add(panel["title"])
    assert empty <= EMPTY


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_series_of_a_panel_has_a_legend_of_its_own(path: Path, prometheus: str) -> None:
    for panel in panels(path):
        legends = []
        for target in panel["targets"]:
            for series in query(prometheus, target["expr"].replace("$__rate_interval", "30s")):
                legend = target["legendFormat"]
                for label, value in series["metric"].items():
                    legend = legend.replace("{{" + label + "}}", value)
                assert "{{" not in legend, f"{panel['title']}: {legend}"
                legends.append(legend)
        assert len(set(legends)) == len(legends), panel["title"]
