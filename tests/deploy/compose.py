"""docker-compose.yml as it is when nothing is set but what .env sets, and with its override for TLS."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fastserve_common.settings import Settings

from .dockerfile import ROOT, SERVICES, serving_image
from .services import load

PATH = ROOT / "docker-compose.yml"
TLS_PATH = ROOT / "docker-compose.tls.yml"
PROFILES = ("cpu", "gpu")


def document(path: Path = PATH) -> dict[str, Any]:
    return dict(yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", path.read_text())))


@dataclass(frozen=True, slots=True)
class Service:
    name: str
    facts: Mapping[str, Any]

    @property
    def role(self) -> str:
        """Which of our services it runs; empty: none."""
        role = str(self.facts.get("image", "")).removeprefix("fastserve-")
        return role if role in SERVICES else ""

    @property
    def profiles(self) -> tuple[str, ...]:
        """In which it runs."""
        return tuple(self.facts.get("profiles", PROFILES))

    @property
    def grace_s(self) -> float:
        return float(str(self.facts.get("stop_grace_period", "10s")).removesuffix("s"))

    def environment(self) -> dict[str, str]:
        return serving_image(self.role).environment() | dict(self.facts.get("environment", {}))

    def settings(self) -> Settings:
        """What its process would start with. Raises SettingsError."""
        ours = {name: value for name, value in self.environment().items() if name.startswith("FASTSERVE_")}
        return load(self.role, self.facts["command"], ours)

    def mounts(self) -> dict[str, str]:
        """Source by target."""
        return {volume.split(":")[1]: volume.split(":")[0] for volume in self.facts.get("volumes", [])}


def services() -> dict[str, Service]:
    return {name: Service(name, facts) for name, facts in document()["services"].items()}


def ours() -> list[Service]:
    return [service for service in services().values() if service.role]


def with_tls() -> list[Service]:
    """Ours, merged with the override as Compose does it: lists and maps grow, everything else is replaced."""
    added = document(TLS_PATH)["services"]
    return [Service(service.name, _merged(service.facts, added.get(service.name, {}))) for service in ours()]


def _merged(facts: Mapping[str, Any], added: Mapping[str, Any]) -> dict[str, Any]:
    grown = {
        "environment": {**facts.get("environment", {}), **added.get("environment", {})},
        "volumes": [*facts.get("volumes", []), *added.get("volumes", [])],
    }
    return {**facts, **added, **grown}
