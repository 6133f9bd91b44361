"""Dashboards: about metrics that exist, and whole."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from .compose import services
from .dockerfile import ROOT
from .exposed import exposed
from .promql import complaints

GRAFANA = ROOT / "deploy/grafana"
FILES = sorted((GRAFANA / "dashboards").glob("*.json"))

#: Only ever of interest as parts of others, or told by them, or a second time.
NOT_DRAWN = re.compile(r"_(count|sum|created)$|^process_(start_time|virtual)|^python_|^vllm:")


def dashboard(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


def panels(path: Path) -> list[dict[str, Any]]:
    return [panel for panel in dashboard(path)["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    return [target["expr"] for path in FILES for panel in panels(path) for target in panel["targets"]]


def test_there_are_three_and_each_has_a_name_of_its_own() -> None:
    assert [path.stem for path in FILES] == ["kv-and-swap-traffic", "queues-and-latency", "services"]
    for key in ("uid", "title"):
        assert len({dashboard(path)[key] for path in FILES}) == len(FILES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_panel_asks_for_what_the_services_expose(path: Path) -> None:
    wrong = {panel["title"]: complaints(target["expr"]) for panel in panels(path) for target in panel["targets"]}
    assert {title: found for title, found in wrong.items() if found} == {}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_panels_have_titles_and_places_of_their_own(path: Path) -> None:
    everything = dashboard(path)["panels"]
    assert len({panel["id"] for panel in everything}) == len(everything)
    assert all(panel["title"] for panel in everything)
    cells: set[tuple[int, int]] = set()
    for panel in everything:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not own & cells
        cells |= own


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_legends_name_labels_that_the_expression_keeps(path: Path) -> None:
    for panel in panels(path):
        for target in panel["targets"]:
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                kept = re.findall(r"by \(([^)]*)\)", target["expr"])
                assert not kept or label in re.findall(r"\w+", kept[0])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_they_ask_the_chosen_prometheus(path: Path) -> None:
    (variable,) = dashboard(path)["templating"]["list"]
    assert (variable["type"], variable["query"]) == ("datasource", "prometheus")
    for panel in panels(path):
        for holder in (panel, *panel["targets"]):
            assert holder["datasource"] == {"type": "prometheus", "uid": "${" + variable["name"] + "}"}


def test_everything_that_is_exposed_is_drawn_somewhere() -> None:
    text = " ".join(expressions())
    names = {
        name.removesuffix("_bucket") for samples in exposed().values() for name in samples if not NOT_DRAWN.search(name)
    }
    assert {name for name in names if name not in text} == set()


def test_provisioning_leads_to_what_is_mounted_and_running() -> None:
    grafana = services()["grafana"]
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/fastserve.yml").read_text())["providers"]
    assert grafana.mounts()[provider["options"]["path"]] == "./deploy/grafana/dashboards"
    (source,) = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text())["datasources"]
    host, port = source["url"].removeprefix("http://").split(":")
    assert services()[host].facts["ports"] == [f"127.0.0.1:{port}:{port}"]


@pytest.mark.infra
def test_promtool_parses_every_expression(tmp_path: Path, need: Callable[[str], None]) -> None:
    need("promtool")
    rules = [
        {"record": f"panel:{number}", "expr": expression.replace("$__rate_interval", "1m")}
        for number, expression in enumerate(expressions())
    ]
    path = tmp_path / "panels.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    result = subprocess.run(["promtool", "check", "rules", str(path)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
