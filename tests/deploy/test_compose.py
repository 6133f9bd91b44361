"""The Compose file against the code that it starts, and against itself."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from fastserve_common.tls import ClusterSettings
from fastserve_common.units import MIB
from fastserve_gateway.settings import GatewaySettings
from fastserve_kvstore.settings import KvStoreSettings
from fastserve_kvstore.slabs import ALIGNMENT_SLACK_BYTES
from fastserve_scheduler.app import LAST_WORDS_S
from fastserve_scheduler.settings import SchedulerSettings
from fastserve_worker.service import STOP_COMPUTE_S, STOP_GRACE_S
from fastserve_worker.settings import WorkerSettings

from .compose import PATH, PROFILES, TLS_PATH, Service, document, ours, services, with_tls
from .dockerfile import ROOT


def one(role: str) -> Any:  # noqa: ANN401 - the settings class of the role
    (service,) = [service for service in ours() if service.role == role]
    return service.settings()


def stages(profile: str) -> list[tuple[Service, WorkerSettings]]:
    found = [(s, s.settings()) for s in ours() if s.role == "worker" and profile in s.profiles]
    return [(service, settings) for service, settings in found if isinstance(settings, WorkerSettings)]


@pytest.mark.parametrize("service", ours(), ids=lambda service: service.name)
def test_every_command_line_is_one_that_the_service_takes(service: Service) -> None:
    assert service.settings().model_dump()["state"] == "redis://redis:6379/0"


def test_gateway_and_scheduler_call_the_model_by_one_name() -> None:
    scheduler: SchedulerSettings = one("scheduler")
    gateway: GatewaySettings = one("gateway")
    assert scheduler.served_model_name == gateway.model_names


@pytest.mark.parametrize("profile", PROFILES)
def test_each_profile_has_one_whole_pipeline(profile: str) -> None:
    scheduler: SchedulerSettings = one("scheduler")
    settings = [settings for _, settings in stages(profile)]
    assert [s.stage for s in settings] == list(range(scheduler.num_stages))
    assert {s.num_stages for s in settings} == {scheduler.num_stages}
    assert {s.device for s in settings} == {"cuda" if profile == "gpu" else "cpu"}
    assert len({(s.kv_memory, s.block_size, s.model_dir) for s in settings}) == 1


def test_the_profile_of_a_plain_up_is_the_one_for_cpus() -> None:
    lines = (ROOT / ".env").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == ["COMPOSE_PROFILES=cpu"]


def test_gpu_stages_reserve_a_gpu_and_the_others_none() -> None:
    for profile in PROFILES:
        for service, _ in stages(profile):
            assert ("deploy" in service.facts) == (profile == "gpu")


def test_everyone_says_an_address_that_the_others_can_resolve() -> None:
    for service in ours():
        settings = service.settings()
        if not isinstance(settings, GatewaySettings):
            assert settings.model_dump()["advertise"] == service.name
            assert settings.model_dump()["listen"].startswith("0.0.0.0:")
        else:
            assert settings.host == "0.0.0.0"


def test_what_is_depended_on_is_there_and_can_come_about() -> None:
    known = services()
    for service in known.values():
        for name, how in service.facts.get("depends_on", {}).items():
            assert set(service.profiles) <= set(known[name].profiles), "it would wait for what does not run"
            if how["condition"] == "service_healthy":
                assert known[name].role or "healthcheck" in known[name].facts
            elif how["condition"] != "service_started":
                assert how["condition"] == "service_completed_successfully"
                assert known[name].facts["restart"] == "no"


def test_every_volume_is_declared_and_used_and_every_file_exists() -> None:
    declared = set(document()["volumes"])
    used = set()
    for service in services().values():
        for source in service.mounts().values():
            if source.startswith("./"):
                assert (ROOT / source).exists()
            else:
                used.add(source)
    assert used == declared


def test_no_two_services_want_one_port_of_the_machine() -> None:
    ports = [port.rsplit(":", 2)[1] for s in services().values() for port in s.facts.get("ports", [])]
    assert len(ports) == len(set(ports))
    assert {"8000", "8001"} <= set(ports)


def test_ports_are_open_to_this_machine_only() -> None:
    for service in services().values():
        for port in service.facts.get("ports", []):
            assert port.startswith("127.0.0.1:")


def test_kvstore_and_stages_share_memory_that_holds_the_arena() -> None:
    sharing = [service for service in ours() if service.role in ("kvstore", "worker")]
    assert {service.mounts()["/dev/shm"] for service in sharing} == {"shm"}
    options = document()["volumes"]["shm"]["driver_opts"]
    assert options["type"] == "tmpfs"
    size = re.search(r"size=(\d+)m", options["o"])
    assert size is not None
    kvstore: KvStoreSettings = one("kvstore")
    assert int(size[1]) * MIB >= kvstore.host_kv_memory + ALIGNMENT_SLACK_BYTES
    assert {settings.node for profile in PROFILES for _, settings in stages(profile)} == {kvstore.node}


def test_who_is_stopped_has_the_time_to_end_in_order() -> None:
    for service in ours():
        settings = service.settings()
        if isinstance(settings, SchedulerSettings | GatewaySettings):
            assert service.grace_s > settings.drain_timeout + 2 * LAST_WORDS_S
        elif isinstance(settings, WorkerSettings):
            assert service.grace_s > STOP_GRACE_S + STOP_COMPUTE_S


def test_the_model_is_prepared_where_it_is_looked_for() -> None:
    preparation = services()["model"]
    link = Path(preparation.facts["command"][1])
    for service in ours():
        if service.role in ("gateway", "worker"):
            assert service.settings().model_dump()["model_dir"] == link
            assert service.mounts()[str(link.parent)] == preparation.mounts()[str(link.parent)]


def test_containers_of_ours_can_do_little() -> None:
    for service in ours():
        assert service.facts["read_only"] is True
        assert service.facts["cap_drop"] == ["ALL"]
        assert "no-new-privileges:true" in service.facts["security_opt"]


def test_prometheus_scrapes_everybody_who_counts() -> None:
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    (found,) = jobs.pop("fastserve-stage")["dns_sd_configs"]
    assert found["names"] == [service.name for profile in PROFILES for service, _ in stages(profile)]
    ports = {settings.metrics_listen for profile in PROFILES for _, settings in stages(profile)}
    assert {f"0.0.0.0:{found['port']}"} == ports
    static = {name: job["static_configs"][0]["targets"] for name, job in jobs.items()}
    gateway, scheduler, kvstore = one("gateway"), one("scheduler"), one("kvstore")
    assert static == {
        "fastserve-gateway": [f"gateway:{gateway.port}"],
        "fastserve-scheduler": [f"scheduler:{scheduler.metrics_port}"],
        "fastserve-kvstore": [f"kvstore:{kvstore.metrics_listen.rpartition(':')[2]}"],
    }
    assert scheduler.metrics_host == "0.0.0.0"


@pytest.mark.parametrize("service", with_tls(), ids=lambda service: service.name)
def test_the_override_for_tls_gives_everybody_an_identity(service: Service) -> None:
    settings = service.settings()
    assert isinstance(settings, ClusterSettings)
    folder = service.mounts()
    for path in (settings.tls_cert, settings.tls_key, settings.tls_ca):
        assert path is not None
        assert folder[str(path.parent)] == "./tls"
    if service.role == "gateway":  # its public port asks for no certificate, so the probe must not speak TLS to it
        (*command, program) = service.facts["healthcheck"]["test"]
        assert command == ["CMD", "python", "-c"]
        compile(program, "healthcheck", "exec")
        assert f"http://127.0.0.1:{one('gateway').port}/health/ready" in program


def test_the_override_names_only_services_that_there_are() -> None:
    assert set(document(TLS_PATH)["services"]) == {service.name for service in ours()}


@pytest.mark.infra
@pytest.mark.parametrize("path", [PATH, TLS_PATH], ids=lambda path: path.name)
def test_it_is_valid_by_the_specification(path: Path, need: Callable[[str], None]) -> None:
    need("check_jsonschema")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
