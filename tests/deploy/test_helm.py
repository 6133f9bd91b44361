"""The chart as Helm renders it: valid, against the code that it starts, and against itself."""

import importlib
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from fastserve_common.units import parse_bytes
from fastserve_gateway.settings import GatewaySettings
from fastserve_kvstore.settings import KvStoreSettings
from fastserve_kvstore.slabs import ALIGNMENT_SLACK_BYTES
from fastserve_scheduler.app import LAST_WORDS_S
from fastserve_scheduler.settings import SchedulerSettings
from fastserve_worker.service import STOP_COMPUTE_S, STOP_GRACE_S
from fastserve_worker.settings import WorkerSettings

from .chart import PATH, POD_INDEX, VARIANTS, Workload, documents, files, ours, render, selectors, values, workloads
from .exposed import exposed
from .promql import complaints

pytestmark = [pytest.mark.infra, pytest.mark.parametrize("variant", VARIANTS)]

#: Kinds that are no part of Kubernetes itself; their schemas come with their operators.
CUSTOM = ("ServiceMonitor", "PrometheusRule", "ScaledObject")


@pytest.fixture(autouse=True)
def helm(need: Callable[[str], None]) -> None:
    need("helm_python")


def of(variant: str, component: str) -> list[Workload]:
    return [workload for workload in workloads(variant) if workload.component == component]


def test_helm_has_no_complaint(variant: str) -> None:
    report = importlib.import_module("helm_python").lint(str(PATH), values=values(variant))
    assert report["errors"] == []
    assert [message["error"] for message in report["messages"]] in ([], ["icon is recommended"])


def test_kubernetes_would_take_it(variant: str, tmp_path: Path, need: Callable[[str], None]) -> None:
    need("kubernetes_validate")
    path = tmp_path / "all.yaml"
    path.write_text(yaml.safe_dump_all(d for d in documents(variant) if d["kind"] not in CUSTOM))
    command = [str(Path(sys.executable).with_name("kubernetes-validate")), "--strict", "-k", "1.31", str(path)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_command_line_is_one_that_the_service_takes(variant: str) -> None:
    for workload in ours(variant):
        external = not values(variant).get("redis", {}).get("enabled", True)
        state = "redis://elsewhere:6379/0" if external else "redis://demo-fastserve-redis:6379/0"
        assert workload.settings().model_dump()["state"] == state


def pipelines(variant: str) -> dict[int, list[WorkerSettings]]:
    """The stages of each, as their pods would start."""
    found: dict[int, list[WorkerSettings]] = {}
    for workload in of(variant, "stage"):
        assert workload.document["kind"] == "StatefulSet"
        for ordinal in range(workload.replicas):
            settings = workload.settings(ordinal)
            assert isinstance(settings, WorkerSettings)
            found.setdefault(settings.replica, []).append(settings)
    return found


def test_every_pipeline_is_whole_and_the_scheduler_knows_how_many_there_are(variant: str) -> None:
    (scheduler,) = [s for w in of(variant, "scheduler") if isinstance(s := w.settings(), SchedulerSettings)]
    assert scheduler.num_replicas == values(variant).get("pipeline", {}).get("replicas", 1)
    assert sorted(pipelines(variant)) == list(range(scheduler.num_replicas))
    size = values(variant).get("pipeline", {}).get("tensorParallelSize", 1)
    for stages in pipelines(variant).values():
        places = [(s.stage, s.tensor_parallel_rank) for s in stages]
        assert places == [(stage, rank) for stage in range(scheduler.num_stages) for rank in range(size)]
        assert {(s.num_stages, s.tensor_parallel_size) for s in stages} == {(scheduler.num_stages, size)}
        if scheduler.max_model_len:
            assert {s.max_model_len for s in stages} == {scheduler.max_model_len}


def test_no_kvstore_is_swapped_with_by_two_pipelines(variant: str) -> None:
    """Either each has its own, or no node runs two."""
    nodes = {replica: {s.node for s in stages} for replica, stages in pipelines(variant).items()}
    assert all(len(names) == 1 for names in nodes.values())
    kvstores = [s.node for w in of(variant, "kvstore") if isinstance(s := w.settings(), KvStoreSettings)]
    assert len(set(kvstores)) == len(kvstores)
    if kvstores:
        assert {name for names in nodes.values() for name in names} == set(kvstores)
    for workload in of(variant, "stage"):
        apart = workload.pod.get("affinity", {}).get("podAntiAffinity")
        assert (apart is not None) == (0 < len(kvstores) < len(nodes))
        if apart is not None:
            (term,) = apart["requiredDuringSchedulingIgnoredDuringExecution"]
            assert term["mismatchLabelKeys"] == [POD_INDEX], "pods of one number are one pipeline"
            assert term["topologyKey"] == "kubernetes.io/hostname"
            assert all(term["labelSelector"]["matchLabels"].items() <= w.labels.items() for w in of(variant, "stage"))


def test_disruptions_leave_all_pipelines_but_one(variant: str) -> None:
    budgets = [d["spec"] for d in documents(variant, "PodDisruptionBudget")]
    assert all(budget["maxUnavailable"] == 1 for budget in budgets)
    for workload in workloads(variant):
        chosen = [b for b in budgets if b["selector"]["matchLabels"].items() <= workload.labels.items()]
        several = workload.component == "stage" and workload.replicas > 1
        assert len(chosen) == (several or workload.component in ("gateway", "scheduler")), workload.name


def test_gateways_and_schedulers_call_the_model_by_one_name(variant: str) -> None:
    (gateway,) = [s for w in of(variant, "gateway") if isinstance(s := w.settings(), GatewaySettings)]
    (scheduler,) = [s for w in of(variant, "scheduler") if isinstance(s := w.settings(), SchedulerSettings)]
    assert scheduler.served_model_name == gateway.model_names
    assert scheduler.vllm_metric_names == gateway.vllm_metric_names


def test_no_variable_of_a_service_can_be_taken_for_a_setting(variant: str) -> None:
    assert all(workload.pod["enableServiceLinks"] is False for workload in workloads(variant))


def test_pods_can_do_little(variant: str) -> None:
    for workload in workloads(variant):
        assert workload.pod["automountServiceAccountToken"] is False
        assert workload.pod["securityContext"]["runAsNonRoot"] is True
        for container in [*workload.pod["containers"], *workload.pod.get("initContainers", [])]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["requests"]


def test_who_is_stopped_has_the_time_to_end_in_order(variant: str) -> None:
    for workload in ours(variant):
        settings, grace_s = workload.settings(), workload.pod["terminationGracePeriodSeconds"]
        sleep_s = workload.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        if isinstance(settings, SchedulerSettings | GatewaySettings):
            assert grace_s > sleep_s + settings.drain_timeout + 2 * LAST_WORDS_S
        elif isinstance(settings, WorkerSettings):
            assert grace_s > STOP_GRACE_S + STOP_COMPUTE_S
    assert all(w.container["lifecycle"]["preStop"]["sleep"]["seconds"] > 0 for w in of(variant, "gateway"))


def test_probes_and_services_ask_ports_that_are_listened_on(variant: str) -> None:
    for workload in ours(variant):
        container, settings = workload.container, workload.settings().model_dump()
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        listens = {settings[name] for name in ("port", "grpc_port", "metrics_port") if name in settings}
        addresses = [settings[name] for name in ("listen", "metrics_listen") if name in settings]
        assert set(ports.values()) == listens | {int(address.rpartition(":")[2]) for address in addresses}
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            probe = container[kind]
            if "grpc" in probe:
                assert probe["grpc"]["port"] == ports["grpc"]
            elif "httpGet" in probe:
                assert probe["httpGet"]["port"] in ports
                assert (probe["httpGet"]["scheme"] == "HTTPS") == bool(settings["ssl_certfile"])
            else:
                assert probe["exec"]["command"][3] == f"127.0.0.1:{ports['grpc']}"


def test_services_with_certificates_have_them_and_show_them_to_themselves(variant: str) -> None:
    secret = values(variant).get("clusterTls", {}).get("secret")
    for workload in ours(variant):
        settings = workload.settings()
        assert (settings.model_dump()["tls_cert"] is not None) == bool(secret)
        if not secret:
            continue
        (volume,) = [v for v in workload.pod["volumes"] if v["name"] == "cluster-tls"]
        assert volume["secret"] == {"secretName": secret, "defaultMode": 0o440}
        (mount,) = [m for m in workload.container["volumeMounts"] if m["name"] == "cluster-tls"]
        paths = [settings.model_dump()[name] for name in ("tls_cert", "tls_key", "tls_ca")]
        assert {str(path.parent) for path in paths} == {mount["mountPath"]}
        probes = [workload.container[kind] for kind in ("startupProbe", "livenessProbe", "readinessProbe")]
        assert not [probe for probe in probes if "grpc" in probe], "the kubelet has no certificate"


def test_keys_come_from_a_file_that_may_change(variant: str) -> None:
    (gateway,) = of(variant, "gateway")
    settings, secret = gateway.settings(), values(variant).get("gateway", {}).get("apiKeysSecret")
    assert isinstance(settings, GatewaySettings)
    assert bool(settings.api_key_file) == bool(secret)
    assert "FASTSERVE_API_KEY" not in gateway.environment()
    if settings.api_key_file is not None:
        (mount,) = [m for m in gateway.container["volumeMounts"] if m["name"] == "keys"]
        assert str(settings.api_key_file.parent) == mount["mountPath"]
        (volume,) = [v for v in gateway.pod["volumes"] if v["name"] == "keys"]
        assert volume["secret"] == {"secretName": secret, "defaultMode": 0o440}


def test_selectors_find_pods(variant: str) -> None:
    pods = [workload.labels.items() for workload in workloads(variant)]
    chosen = [s for d in documents(variant) if d["kind"] != "ServiceMonitor" for s in selectors(d)]
    chosen += [d["spec"]["selector"] for d in documents(variant, "Service")]
    others = values(variant).get("networkPolicy", {}).get("gatewaysOfReleases", [])
    for selector in chosen:
        if selector.get("app.kubernetes.io/instance") in others:
            assert selector["app.kubernetes.io/component"] == "gateway"
        elif "kubernetes.io/metadata.name" not in selector and selector["app.kubernetes.io/component"] != "kvstore":
            assert any(selector.items() <= labels for labels in pods), selector
    own = [
        (w.document["spec"]["selector"]["matchLabels"], w.labels)
        for w in workloads(variant)
        if w.document["kind"] != "Job"
    ]
    assert all(selector.items() <= labels.items() for selector, labels in own)
    assert len({tuple(sorted(selector.items())) for selector, _ in own}) == len(own), "two would fight over pods"


def test_services_lead_to_ports_of_their_pods(variant: str) -> None:
    for service in documents(variant, "Service"):
        behind = [w for w in workloads(variant) if service["spec"]["selector"].items() <= w.labels.items()]
        assert behind
        for port in service["spec"]["ports"]:
            for workload in behind:
                known = {p["name"]: p["containerPort"] for p in workload.container["ports"]}
                assert port.get("targetPort", port["port"]) in (*known, *known.values())


def test_every_mount_has_its_volume(variant: str) -> None:
    claims = {d["metadata"]["name"] for d in documents(variant, "PersistentVolumeClaim")}
    claims.add(values(variant).get("model", {}).get("volume", {}).get("existingClaim", ""))
    for workload in workloads(variant):
        volumes = {volume["name"] for volume in workload.pod.get("volumes", [])}
        volumes |= {t["metadata"]["name"] for t in workload.document["spec"].get("volumeClaimTemplates", [])}
        for container in [*workload.pod["containers"], *workload.pod.get("initContainers", [])]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        for volume in workload.pod.get("volumes", []):
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims


def test_kvstore_and_stages_of_a_node_share_memory_and_its_limit_holds_the_arena(variant: str) -> None:
    sharing = [*of(variant, "kvstore"), *of(variant, "stage")]
    shm = [v.get("hostPath", {}).get("path") for w in sharing for v in w.pod["volumes"] if v["name"] == "shm"]
    assert shm == ["/dev/shm"] * (len(sharing) if of(variant, "kvstore") else 0)
    for workload in of(variant, "kvstore"):
        settings = workload.settings()
        assert isinstance(settings, KvStoreSettings)
        limit = parse_bytes(workload.container["resources"]["limits"]["memory"] + "B")
        assert limit > settings.host_kv_memory + ALIGNMENT_SLACK_BYTES + parse_bytes("128MiB")
        for stage in of(variant, "stage"):
            (term,) = stage.pod["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
            assert term["matchLabelKeys"] == [POD_INDEX], "pods of one number are one pipeline"
            assert stage.pod.get("nodeSelector") == workload.pod.get("nodeSelector")


def test_the_model_is_prepared_where_it_is_waited_for(variant: str, tmp_path: Path) -> None:
    folders = {
        str(w.settings().model_dump()["model_dir"]) for w in ours(variant) if w.component in ("gateway", "stage")
    }
    (folder,) = folders
    jobs = documents(variant, "Job")
    waiting = [c for w in workloads(variant) for c in w.pod.get("initContainers", [])]
    if values(variant).get("model", {}).get("path"):
        assert (jobs, waiting) == ([], [])
        return
    (job,) = jobs
    assert job["spec"]["template"]["spec"]["containers"][0]["args"][1] == folder
    (tmp_path / "config.json").touch()
    for container in waiting:
        *command, target = container["command"]
        assert target == folder
        assert subprocess.run([sys.executable, *command[1:], str(tmp_path)], timeout=30).returncode == 0


def test_another_model_is_another_place_and_another_job(variant: str) -> None:
    given = {**values(variant), "model": {"name": "another/model"}}
    (job,) = [d for d in render(given) if d["kind"] == "Job"]
    before = documents(variant, "Job")
    assert job["metadata"]["name"] not in [d["metadata"]["name"] for d in before]
    places = [d["spec"]["template"]["spec"]["containers"][0]["args"][1] for d in [job, *before]]
    assert len(set(places)) == len(places)


def test_names_are_names_of_their_own(variant: str) -> None:
    named = [(d["kind"], d["metadata"]["name"]) for d in documents(variant)]
    assert len(set(named)) == len(named)
    assert all(re.fullmatch(r"[a-z0-9-]{1,63}", name) for _, name in named)


def test_scraped_jobs_are_those_that_rules_and_dashboards_know(variant: str) -> None:
    labelled = [d for d in documents(variant, "Service") if "fastserve-job" in d["metadata"]["labels"]]
    jobs = {d["metadata"]["labels"]["fastserve-job"] for d in labelled}
    assert jobs == set(exposed()) - (set() if of(variant, "kvstore") else {"fastserve-kvstore"})
    for monitor in documents(variant, "ServiceMonitor"):
        assert monitor["spec"]["jobLabel"] == "fastserve-job"
        scraped = {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]}
        for service in labelled:
            assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
            assert len(scraped & {port["name"] for port in service["spec"]["ports"]}) == 1


def test_rules_and_dashboards_are_the_ones_of_this_repository(variant: str) -> None:
    for rule in documents(variant, "PrometheusRule"):
        assert rule["spec"] == yaml.safe_load(files("rules")["fastserve.yml"])
    for config in documents(variant, "ConfigMap"):
        assert config["data"] == files("dashboards")


def test_gateways_are_scaled_on_requests_that_wait(variant: str) -> None:
    (gateway,) = of(variant, "gateway")
    scalers = documents(variant, "ScaledObject", "HorizontalPodAutoscaler")
    assert len(scalers) == ("replicas" not in gateway.document["spec"])
    for scaler in scalers:
        assert scaler["spec"]["scaleTargetRef"]["name"] == gateway.name
        for trigger in scaler["spec"].get("triggers", []):
            query = trigger["metadata"]["query"].replace(',namespace="serving"', "")
            assert complaints(query) == []


def test_ranks_of_a_stage_reach_each_other_on_any_port(variant: str) -> None:
    """Their collectives pick their own ports; nobody else's are open."""
    several = values(variant).get("pipeline", {}).get("tensorParallelSize", 1) > 1
    for policy in documents(variant, "NetworkPolicy"):
        open_to = [rule["from"] for rule in policy["spec"]["ingress"] if "ports" not in rule]
        component = policy["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
        stage = {"podSelector": {"matchLabels": policy["spec"]["podSelector"]["matchLabels"]}}
        assert open_to == ([[stage]] if several and component == "stage" else [])


@pytest.mark.parametrize(
    "wrong",
    [
        {"pipeline": {"stages": 0}},
        {"pipeline": {"replicas": 0}},
        {"pipeline": {"tensorParallelSize": 0}},
        {"pipeline": {"device": "tpu"}},
        {"pipeline": {"kvMemory": "much"}},
        {"gateway": {"replica": 3}},
        {"redis": {"enabled": False, "external": {"url": "", "urlSecret": ""}}},
        {"kvstore": {"lockMemory": True}},
    ],
    ids=lambda wrong: "-".join(str(next(iter(wrong.values()))).split()),
)
def test_wrong_values_are_refused(variant: str, wrong: dict[str, Any]) -> None:
    base = values(variant)
    given = {**base, **{name: {**base.get(name, {}), **section} for name, section in wrong.items()}}
    with pytest.raises(importlib.import_module("helm_python").HelmError):
        render(given)
