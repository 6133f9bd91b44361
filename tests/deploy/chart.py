"""The Helm chart, rendered by Helm itself."""

import functools
import importlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fastserve_common.settings import Settings

from .dockerfile import ROOT, serving_image
from .services import load

PATH = ROOT / "deploy/helm/fastserve"
VARIANTS = ("default", "gpu", "external-redis", "tls", "replicas", "ranks")
NAMESPACE = "serving"

#: The service behind each component that runs one of ours.
ROLES = {"gateway": "gateway", "scheduler": "scheduler", "stage": "worker", "kvstore": "kvstore"}
POD_INDEX = "apps.kubernetes.io/pod-index"
#: What the cluster would fill in.
FIELDS = {"status.podIP": "10.0.0.1", "spec.nodeName": "node-a"}

Document = dict[str, Any]


def values(variant: str) -> Document:
    path = PATH / "ci" / f"{variant}-values.yaml"
    return dict(yaml.safe_load(path.read_text())) if path.exists() else {}


def render(given: Mapping[str, Any]) -> list[Document]:
    """Raises helm_python.HelmError when the values do not fit the schema."""
    helm = importlib.import_module("helm_python")  # not installed where only `make lint` runs
    with helm.Chart.load(str(PATH)) as chart:
        chart.validate_schema(dict(given))
        manifests = chart.render(dict(given), name="demo", namespace=NAMESPACE)
    texts = [text for name, text in sorted(manifests.items()) if name.endswith(".yaml")]
    return [document for text in texts for document in yaml.safe_load_all(text) if document]


@functools.cache
def _rendered(variant: str) -> str:
    return json.dumps(render(values(variant)))


def documents(variant: str, *kinds: str) -> list[Document]:
    everything: list[Document] = json.loads(_rendered(variant))
    return [document for document in everything if not kinds or document["kind"] in kinds]


@dataclass(frozen=True, slots=True)
class Workload:
    """Something that has pods."""

    name: str
    document: Document

    @property
    def component(self) -> str:
        return str(self.labels["app.kubernetes.io/component"])

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.document["spec"]["template"]["metadata"]["labels"])

    @property
    def pod(self) -> Document:
        return dict(self.document["spec"]["template"]["spec"])

    @property
    def container(self) -> Document:
        (container,) = self.pod["containers"]
        return dict(container)

    @property
    def replicas(self) -> int:
        return int(self.document["spec"]["replicas"])

    def environment(self, ordinal: int = 0) -> dict[str, str]:
        """What the image and the pod of this number set; secrets by a value of their kind."""
        found = serving_image(ROLES[self.component]).environment()
        fields = {**FIELDS, f"metadata.labels['{POD_INDEX}']": str(ordinal)}
        for entry in self.container["env"]:
            source = entry.get("valueFrom", {})
            if "fieldRef" in source:
                found[entry["name"]] = fields[source["fieldRef"]["fieldPath"]]
            elif "secretKeyRef" in source:
                found[entry["name"]] = {"url": "redis://elsewhere:6379/0"}[source["secretKeyRef"]["key"]]
            else:
                found[entry["name"]] = entry["value"]
        return found

    def settings(self, ordinal: int = 0) -> Settings:
        """What the process of the pod of this number would start with. Raises SettingsError."""
        environment = self.environment(ordinal)
        argv = list(self.container["args"])
        for name, value in environment.items():
            argv = [word.replace(f"$({name})", value) for word in argv]
        assert not [word for word in argv if "$(" in word]
        ours = {name: value for name, value in environment.items() if name.startswith("FASTSERVE_")}
        return load(ROLES[self.component], argv, ours)


def workloads(variant: str) -> list[Workload]:
    kinds = ("Deployment", "StatefulSet", "DaemonSet", "Job")
    return [Workload(document["metadata"]["name"], document) for document in documents(variant, *kinds)]


def ours(variant: str) -> list[Workload]:
    return [workload for workload in workloads(variant) if workload.component in ROLES]


def selectors(document: Document) -> Iterator[dict[str, str]]:
    """Every label selector in it, wherever it stands."""
    if "matchLabels" in document:
        yield document["matchLabels"]
    for value in document.values():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict):
                yield from selectors(item)


def files(folder: str) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(Path(PATH / folder).iterdir())}
