"""Alert rules: only about metrics that exist, and each proved to fire and to stay quiet."""

import re
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from .dockerfile import ROOT
from .exposed import exposed, expositions
from .promql import complaints

PROMETHEUS = ROOT / "deploy/prometheus"


def alerts() -> list[dict[str, Any]]:
    files = sorted((PROMETHEUS / "rules").glob("*.yml"))
    groups = [group for path in files for group in yaml.safe_load(path.read_text())["groups"]]
    return [rule for group in groups for rule in group["rules"]]


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert["alert"])
def test_it_asks_for_what_the_services_expose(alert: dict[str, Any]) -> None:
    assert complaints(alert["expr"]) == []


def test_jobs_are_those_that_are_scraped() -> None:
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    assert {job["job_name"] for job in config["scrape_configs"]} == set(exposed())


def test_what_is_not_exposed_is_noticed() -> None:
    assert complaints('fastserve:no_such{job="fastserve-gateway"}') != []
    assert complaints("fastserve:ready") != []
    assert complaints('fastserve:ready{job="fastserve-gateway"}') != []
    assert complaints('fastserve:ready{job="fastserve-scheduler",stage="0"}') != []
    assert complaints('sum by (nothing) (fastserve:ready{job="fastserve-scheduler"})') != []
    assert complaints('sum(fastserve:ready{job="fastserve-scheduler"})') == []


def test_every_alert_is_shown_firing_and_quiet() -> None:
    tests = yaml.safe_load((PROMETHEUS / "fastserve_test.yml").read_text())["tests"]
    checks = [check for test in tests for check in test["alert_rule_test"]]
    names = {alert["alert"] for alert in alerts()}
    assert {check["alertname"] for check in checks if check["exp_alerts"]} == names
    assert {check["alertname"] for check in checks if not check["exp_alerts"]} == names


@pytest.mark.infra
@pytest.mark.parametrize(
    "command",
    [
        ["check", "rules", "rules/fastserve.yml"],
        ["test", "rules", "fastserve_test.yml"],
    ],
    ids=["rules", "tests"],
)
def test_promtool_agrees(command: list[str], need: Callable[[str], None]) -> None:
    need("promtool")
    result = subprocess.run(["promtool", *command], cwd=PROMETHEUS, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.infra
def test_promtool_has_nothing_to_say_about_the_metrics(need: Callable[[str], None]) -> None:
    """But for vLLM's names, and what they bring to ours: the colon, and a histogram that ends in `_total`."""
    need("promtool")
    for text in expositions().values():
        plain = text.replace(b"fastserve:", b"fastserve_")
        result = subprocess.run(["promtool", "check", "metrics"], input=plain, capture_output=True)
        theirs = ("vllm:", "fastserve_iteration_tokens_total ")
        assert [line for line in result.stderr.decode().splitlines() if not line.startswith(theirs)] == []
        assert result.returncode in (0, 3), "3: it has read everything, and has advice"


@pytest.mark.infra
def test_promtool_takes_the_configuration(need: Callable[[str], None]) -> None:
    need("promtool")
    command = ["promtool", "check", "config", "--syntax-only", "prometheus.yml"]
    result = subprocess.run(command, cwd=PROMETHEUS, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_alert_leads_to_a_section_of_the_runbook() -> None:
    page = (ROOT / "docs/operations.md").read_text()
    runbook = page[page.index("\n# Runbook\n") :]
    headings = re.findall(r"^## (\w+)$", runbook, re.MULTILINE)
    names = [alert["alert"] for alert in alerts()]
    assert sorted(headings) == sorted(names), "a section for each alert, and no section without one"
    for alert in alerts():
        assert alert["annotations"]["runbook_url"] == f"docs/operations.md#{alert['alert'].lower()}"
    sections = re.split(r"^## \w+$", runbook, flags=re.MULTILINE)[1:]
    assert all(len(section.split()) >= 20 for section in sections), "each says what to do"
