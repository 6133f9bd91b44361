"""Every command line that `serve` writes is one that its service reads."""

import asyncio
import json
from pathlib import Path

import pytest

from fastserve.cli import specs
from fastserve.cli.model import prepare
from fastserve.cli.reporter import Reporter
from fastserve.cli.settings import ServeSettings
from fastserve.cli.specs import ChildSpec, Model, child_environment
from fastserve_common.settings import Settings
from fastserve_gateway.settings import GatewaySettings
from fastserve_kvstore.settings import KvStoreSettings
from fastserve_scheduler.settings import SchedulerSettings
from fastserve_worker.settings import WorkerSettings

STATE = "sqlite:///run/state.db"
MODEL = Model(Path("/models/m"), "m")

SERVICES: dict[str, type[Settings]] = {
    "fastserve_kvstore": KvStoreSettings,
    "fastserve_worker": WorkerSettings,
    "fastserve_scheduler": SchedulerSettings,
    "fastserve_gateway": GatewaySettings,
}

EVERYTHING = ServeSettings(
    stages=2,
    rate_limit_requests_per_min=60,
    rate_limit_tokens_per_min=9000,
    max_concurrent_requests=70,
    max_concurrent_requests_per_key=7,
    request_timeout=80.0,
    dashboard=False,
    alpha_rounds=3,
    quantum_ratio=4,
    num_queues=5,
    probe_tokens=6,
    slo_first_token_ms=700.0,
    slo_token_ms=80.0,
    replica_patience=9.0,
    journal=Path("/journals/j"),
    dtype="float32",
    linear="fp16",
    threads=2,
    kv_memory=2**30,
    block_size=32,
    max_model_len=512,
    max_num_seqs=8,
    profile_dir=Path("/profiles"),
    fake=True,
    host="127.0.0.1",
    port=9000,
    grpc_port=9005,
    ssl_certfile=Path("/tls/tls.crt"),
    ssl_keyfile=Path("/tls/tls.key"),
    api_key=("secret-1", "secret-2"),
    served_model_name=("a", "b"),
    seed=11,
    max_num_batched_tokens=1024,
    prefill_chunk_tokens=256,
    host_kv_memory=2**30,
    policy="fcfs",
    preset="paper",
    alpha_ms=250.0,
    promotion="return",
    kv_policy="reactive",
    kv_ranking="enst",
    swap_min_batches=3,
    swap_reserve_min_percent=1,
    swap_reserve_max_percent=9,
    kv_checksums=True,
    kv_lease_ttl=12.5,
    timeline=Path("/traces/t.json"),
    max_num_queued_reqs=10,
    max_num_queued_tokens=10_000,
    drain_timeout=5.0,
    metrics_port=9100,
    vllm_metric_names=True,
    log_level="debug",
    log_format="json",
)


def all_specs(settings: ServeSettings) -> list[ChildSpec]:
    kvstore = specs.kvstore(settings, STATE)
    gateway = specs.gateway(settings, STATE, MODEL, port=settings.port, grpc_port=settings.bound_grpc_port)
    workers = specs.workers(settings, STATE, MODEL)
    return [*([kvstore] if kvstore else []), *workers, specs.scheduler(settings, STATE, MODEL), gateway]


def parsed(spec: ChildSpec) -> Settings:
    assert spec.argv[1:3] == ("-m", "fastserve_common.supervised")
    module, *flags = spec.argv[3:]
    return SERVICES[module].load(flags, prog=module)


@pytest.mark.parametrize("settings", [ServeSettings(), EVERYTHING], ids=["defaults", "everything"])
def test_services_accept_their_command_lines(settings: ServeSettings) -> None:
    names = [spec.name for spec in all_specs(settings)]
    assert names == ["kvstore", "stage-0", "stage-1", "scheduler", "gateway"]
    for spec in all_specs(settings):
        parsed(spec)


def test_every_rank_of_every_stage_is_a_process() -> None:
    workers = specs.workers(
        ServeSettings(stages=2, replicas=2, tensor_parallel_size=2, metrics_port=9100), STATE, MODEL
    )
    assert [(spec.role, spec.name) for spec in workers[:4]] == [
        ("stage", "stage-0"),
        ("rank", "stage-0-rank-1"),
        ("stage", "stage-1"),
        ("rank", "stage-1-rank-1"),
    ]
    assert [spec.name for spec in workers[4:6]] == ["stage-1-0", "stage-1-0-rank-1"]
    settings = [parsed(spec) for spec in workers]
    places = [(s.replica, s.stage, s.tensor_parallel_rank) for s in settings if isinstance(s, WorkerSettings)]
    assert places == [(replica, stage, rank) for replica in (0, 1) for stage in (0, 1) for rank in (0, 1)]
    listening = [s.metrics_listen for s in settings if isinstance(s, WorkerSettings)]
    assert all(bool(address) is (rank == 0) for address, (_, _, rank) in zip(listening, places, strict=True))
    assert len(set(listening)) == 5, "one of each stage, and none of the other ranks"


SCHEDULING = (
    *("policy", "preset", "alpha_ms", "alpha_rounds", "promotion", "quantum_ratio", "num_queues", "probe_tokens"),
    *("slo_first_token_ms", "slo_token_ms", "replica_patience", "journal", "vllm_metric_names", "kv_policy"),
    *("kv_ranking", "swap_min_batches", "swap_reserve_min_percent", "swap_reserve_max_percent", "timeline"),
    *("max_num_seqs", "max_num_batched_tokens", "prefill_chunk_tokens", "max_num_queued_reqs"),
    *("max_num_queued_tokens", "max_model_len", "drain_timeout"),
)
CALLERS = (
    *("rate_limit_requests_per_min", "rate_limit_tokens_per_min", "max_concurrent_requests"),
    *("max_concurrent_requests_per_key", "request_timeout", "dashboard", "vllm_metric_names"),
)


def everything() -> dict[str, Settings]:
    """What each service makes of its command line, by its name."""
    return {spec.name: parsed(spec) for spec in all_specs(EVERYTHING)}


def test_what_is_set_arrives_at_the_stages() -> None:
    worker = everything()["stage-1"]
    assert isinstance(worker, WorkerSettings)
    assert (worker.stage, worker.num_stages, worker.threads, worker.block_size) == (1, 2, 2, 32)
    assert (worker.linear, worker.max_model_len, worker.model_dir) == ("fp16", 512, Path("/models/m"))
    assert (worker.fake, worker.kv_checksums) == (True, True)
    for stage in range(2):
        worker = everything()[f"stage-{stage}"]
        assert isinstance(worker, WorkerSettings)
        assert worker.metrics_listen == f"127.0.0.1:{9102 + stage}"


def test_what_is_set_arrives_at_the_scheduler() -> None:
    scheduler = everything()["scheduler"]
    assert isinstance(scheduler, SchedulerSettings)
    for name in SCHEDULING:
        assert getattr(scheduler, name) == getattr(EVERYTHING, name)
    assert (scheduler.num_stages, scheduler.metrics_port) == (2, 9100)
    assert scheduler.vllm_model == "a", "as gateways have it"


def test_what_is_set_arrives_at_the_gateway() -> None:
    gateway = everything()["gateway"]
    assert isinstance(gateway, GatewaySettings)
    assert (gateway.host, gateway.port, gateway.grpc_port, gateway.max_model_len) == ("127.0.0.1", 9000, 9005, 512)
    assert (gateway.served_model_name, gateway.model_root, gateway.drain_timeout) == (("a", "b"), "m", 5.0)
    assert gateway.seed == 11
    for name in CALLERS:
        assert getattr(gateway, name) == getattr(EVERYTHING, name)
    assert (gateway.ssl_certfile, gateway.ssl_keyfile) == (Path("/tls/tls.crt"), Path("/tls/tls.key"))


def test_what_is_set_arrives_at_the_kvstore() -> None:
    kvstore = everything()["kvstore"]
    assert isinstance(kvstore, KvStoreSettings)
    assert kvstore.lease_ttl_s == 12.5
    assert (kvstore.host_kv_memory, kvstore.metrics_listen) == (2**22, "127.0.0.1:9101"), "fake stages need little"


def test_all_services_log_alike() -> None:
    assert {settings.log_level for settings in everything().values()} == {"debug"}
    assert {settings.log_format for settings in everything().values()} == {"json"}


def test_fake_stages_know_the_words_of_the_gateway() -> None:
    model = Model(Path("/models/m"), "m", vocab_size=49_152)
    assert "--fake-vocab-size=49152" in specs.workers(EVERYTHING, STATE, model)[0].argv
    assert not [flag for flag in specs.workers(EVERYTHING, STATE, MODEL)[0].argv if "vocab" in flag]
    real = ServeSettings(fake=False)
    assert not [flag for flag in specs.workers(real, STATE, model)[0].argv if "vocab" in flag]


@pytest.mark.parametrize(
    ("config", "vocab_size"),
    [({"vocab_size": 300}, 300), ({"text_config": {"vocab_size": 400}}, 400), ({}, None), (None, None)],
)
async def test_the_size_of_the_vocabulary_is_read_from_the_folder(
    config: dict[str, object] | None, vocab_size: int | None, tmp_path: Path
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    settings = ServeSettings(model=str(tmp_path), fake=True)
    with Reporter().phase("preparing") as phase:
        assert await prepare(settings, phase, asyncio.Event()) == Model(tmp_path, str(tmp_path), vocab_size)


def test_keys_travel_in_the_environment_never_on_a_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for spec in all_specs(EVERYTHING):
        assert "secret" not in " ".join(spec.argv)
    gateway = all_specs(EVERYTHING)[-1]
    for key, value in gateway.environment.items():
        monkeypatch.setenv(key, value)
    settings = parsed(gateway)
    assert isinstance(settings, GatewaySettings)
    assert settings.api_key == ("secret-1", "secret-2")


def test_our_own_settings_stay_out_of_the_children_s_environment() -> None:
    inherited = {
        "FASTSERVE_PORT": "1",
        "FASTSERVE_CONFIG": "x",
        "FASTSERVE_CHECK": "1",
        "HOME": "/h",
        "OMP_WAIT_POLICY": "x",
    }
    environment = child_environment({}, inherited)
    assert "FASTSERVE_PORT" not in environment
    assert "FASTSERVE_CONFIG" not in environment
    assert (environment["FASTSERVE_CHECK"], environment["HOME"]) == ("1", "/h")
    assert environment["OMP_WAIT_POLICY"] == "x", "what the operator set wins"
    assert environment["MALLOC_MMAP_THRESHOLD_"] == "1073741824"


def test_a_model_without_a_name_goes_by_where_it_came_from() -> None:
    by_name = {spec.name: spec for spec in all_specs(ServeSettings(vllm_metric_names=True))}
    scheduler, gateway = parsed(by_name["scheduler"]), parsed(by_name["gateway"])
    assert isinstance(scheduler, SchedulerSettings)
    assert isinstance(gateway, GatewaySettings)
    assert scheduler.vllm_model == gateway.model_names[0] == "m"


def test_without_host_memory_there_is_no_kvstore() -> None:
    settings = ServeSettings(host_kv_memory=0)
    assert [spec.role for spec in all_specs(settings)] == ["stage", "stage", "scheduler", "gateway"]


def test_the_profile_command_line_is_the_scheduler_s() -> None:
    module, *flags = specs.profile_argv(EVERYTHING, STATE)[3:]
    settings = SERVICES[module].load(flags, prog=module)
    assert isinstance(settings, SchedulerSettings)
    assert settings.profile_only
    assert settings.num_stages == 2


def test_those_who_drain_get_their_time() -> None:
    short, long = (
        {spec.name: spec.stop_s for spec in all_specs(ServeSettings(drain_timeout=drain_s))} for drain_s in (1, 100)
    )
    longer = {name: long[name] - stop_s for name, stop_s in short.items()}
    assert longer == {"kvstore": 0, "stage-0": 0, "stage-1": 0, "scheduler": 99, "gateway": 99}


def test_memory_for_kv_is_as_asked_unless_stages_are_fake() -> None:
    for fake, expected in ((False, 2**30), (True, specs.FAKE_KV_BYTES)):
        settings = ServeSettings(fake=fake, kv_memory=2**30, host_kv_memory=2**30)
        kvstore, worker = specs.kvstore(settings, STATE), specs.workers(settings, STATE, MODEL)[0]
        assert kvstore is not None
        assert f"--host-kv-memory={expected}" in kvstore.argv
        assert f"--kv-memory={expected}" in worker.argv
