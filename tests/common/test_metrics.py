import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Gauge

from fastserve_common.channels import advertised_address
from fastserve_common.metrics import metrics_endpoint
from fastserve_common.settings import SettingsError


def test_a_registry_is_served_while_the_block_runs() -> None:
    registry = CollectorRegistry()
    Gauge("slots", "Slots", registry=registry).set(3)
    with metrics_endpoint("127.0.0.1:0", registry) as address:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            assert b"slots 3.0" in answer.read()
        with pytest.raises(SettingsError, match=f"--metrics-listen: cannot listen on {address}"):
            metrics_endpoint(address, registry).__enter__()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://{address}/metrics", timeout=10)


def test_nothing_is_served_where_nothing_is_asked_for() -> None:
    with metrics_endpoint("", CollectorRegistry()) as address:
        assert address == ""


@pytest.mark.parametrize(
    ("listen", "advertise", "expected"),
    [
        ("127.0.0.1:0", "", "127.0.0.1:7000"),
        ("0.0.0.0:0", "node-3", "node-3:7000"),
        ("[::1]:7000", "", "[::1]:7000"),
    ],
)
def test_what_others_reach_a_server_by(listen: str, advertise: str, expected: str) -> None:
    assert advertised_address(listen, 7000, advertise) == expected


@pytest.mark.parametrize("listen", ["0.0.0.0:1", "[::]:1", ":1"])
def test_every_interface_is_reached_by_the_machine_s_name(listen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node-1")
    assert advertised_address(listen, 7000) == "node-1:7000"


def test_prometheus_gets_the_names_that_rules_and_dashboards_use() -> None:
    registry = CollectorRegistry()
    Gauge("fastserve:ready", "1 when requests are served", registry=registry)
    accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
    with metrics_endpoint("127.0.0.1:0", registry) as address:
        asked = urllib.request.Request(f"http://{address}/metrics", headers={"Accept": accept})
        with urllib.request.urlopen(asked, timeout=10) as response:
            assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
            assert "\nfastserve:ready 0.0" in response.read().decode()
