"""What `serve` accepts, what it refuses before anything starts, and that it knows what the services know."""

import json
import re
import socket
from pathlib import Path
from typing import get_args

import pytest

from fastserve.cli import checks
from fastserve.cli.settings import KvPolicy, Policy, ServeSettings
from fastserve_common.settings import SettingsError
from fastserve_common.units import GIB
from fastserve_scheduler.core.kv import KV_POLICIES
from fastserve_scheduler.core.policies import POLICIES


def load(*argv: str) -> ServeSettings:
    return ServeSettings.load(argv, prog="fastserve serve", positional="model")


def test_the_defaults_serve_the_demo_model_on_a_laptop() -> None:
    settings = load()
    assert (settings.model, settings.stages, settings.max_num_seqs) == ("smollm2-135m-instruct", 2, 16)
    assert (settings.kv_memory, settings.host_kv_memory, settings.port) == (GIB, GIB, 8000)
    assert settings.bound_grpc_port == 8001
    assert load("--port=0").bound_grpc_port == 0
    assert load("--grpc-port=-1").bound_grpc_port == -1


def test_the_scheduler_s_policies_are_known_here() -> None:
    assert get_args(Policy) == tuple(POLICIES)
    assert get_args(KvPolicy) == tuple(KV_POLICIES)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--policy=fastest"], r"--policy: .*'skip-join-mlfq', 'fcfs'.* \(got 'fastest'\)"),
        (["--stages=0"], r"--stages: "),
        (["--stages=65"], r"--stages: "),
        (["--tensor-parallel-size=0"], r"--tensor-parallel-size: "),
        (["--tensor-parallel-size=9"], r"--tensor-parallel-size: "),
        (["--tensor-parallel-size=2", "--fake"], r"--tensor-parallel-size: stages without a model"),
        (["--port=65536"], r"--port: "),
        (["--port=9000", "--grpc-port=9000"], r"--grpc-port: must differ from --port \(got 9000 for both\)"),
        (["--kv-memory=12"], r"--kv-memory: must be at least 1MiB"),
        (["--host-kv-memory=12"], r"--host-kv-memory: must be at least 1MiB"),
        (["--max-num-batched-tokens=8"], r"--max-num-batched-tokens: must be at least --max-num-seqs, 16"),
        (
            ["--max-num-batched-tokens=64", "--prefill-chunk-tokens=65"],
            r"--prefill-chunk-tokens: must not exceed --max-num-batched-tokens, 64",
        ),
        (["--dtype=float16"], r"--dtype: float16 is computed on cuda only"),
        (["--device=cuda", "--linear=packed"], r"--linear: packed is for cpu only"),
        (["--drain-timeout=-1"], r"--drain-timeout: "),
        (["--alpha-ms=0"], r"--alpha-ms: "),
        (["--rate-limit-requests-per-min=0"], r"--rate-limit-requests-per-min: .* \(got '0'\)"),
        (["--rate-limit-tokens-per-min=many"], r"--rate-limit-tokens-per-min: .* \(got 'many'\)"),
        (["--max-concurrent-requests=0"], r"--max-concurrent-requests: "),
        (["--request-timeout=0"], r"--request-timeout: "),
        (["--quantum-ratio=1"], r"--quantum-ratio: "),
        (["--num-queues=-1"], r"--num-queues: "),
        (["--alpha-rounds=-1"], r"--alpha-rounds: "),
        (["--probe-tokens=0"], r"--probe-tokens: "),
        (["--slo-first-token-ms=0"], r"--slo-first-token-ms: "),
        (["--slo-token-ms=-1"], r"--slo-token-ms: "),
        (["--replica-patience=-1"], r"--replica-patience: "),
        (
            ["--swap-reserve-min-percent=20", "--swap-reserve-max-percent=10"],
            r"--swap-reserve-max-percent: must not be below --swap-reserve-min-percent, 20",
        ),
        (
            ["--max-model-len=4096", "--max-num-queued-tokens=4095"],
            r"--max-num-queued-tokens: must hold one prompt of --max-model-len, 4096",
        ),
        (["--ssl-certfile=tls.crt"], "--ssl-certfile and --ssl-keyfile must be given together"),
    ],
)
def test_what_cannot_be_is_refused_with_its_name(argv: list[str], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        load(*argv)


@pytest.mark.parametrize("key", ["", "a b", "a,b", "schlüssel", "a\tb"])
def test_a_key_that_cannot_be_sent_is_refused_without_repeating_it(key: str) -> None:
    with pytest.raises(SettingsError, match="--api-key: a key must be visible ASCII") as error:
        load(f"--api-key={key}")
    assert "got" not in str(error.value)


def test_help_shows_every_setting_once_and_under_a_heading() -> None:
    grouped = [name for names in ServeSettings.groups.values() for name in names]
    assert sorted(grouped) == sorted(set(ServeSettings.model_fields) - {"model"})
    text = ServeSettings.parser("fastserve serve", "model").format_help()
    headings = [text.index(f"\n{title}:\n") for title in ServeSettings.groups]
    assert headings == sorted(headings)
    for name in grouped:
        assert len(re.findall(rf"^  --{name.replace('_', '-')}\b[^-]", text, re.MULTILINE)) == 1, name


def test_host_memory_may_be_none_at_all() -> None:
    assert load("--host-kv-memory=0").host_kv_memory == 0


def test_a_port_in_use_is_said_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=f"--port: port {port} of 127.0.0.1 is in use"):
            checks.check_serve(load(f"--port={port}"))
        with pytest.raises(SettingsError, match=f"--grpc-port: port {port} of 127.0.0.1 is in use"):
            checks.check_serve(load("--port=0", f"--grpc-port={port}"))
        with pytest.raises(SettingsError, match="--metrics-port"):
            checks.check_serve(load("--port=0", f"--metrics-port={port}"))


def test_a_certificate_that_cannot_be_used_is_said_at_once(tmp_path: Path) -> None:
    certificate = tmp_path / "tls.crt"
    flags = ("--port=0", "--host-kv-memory=0", f"--ssl-certfile={certificate}", f"--ssl-keyfile={certificate}")
    with pytest.raises(SettingsError, match=r"--ssl-certfile: cannot use .*tls\.crt.*No such file"):
        checks.check_serve(load(*flags))
    certificate.write_text("not one")
    with pytest.raises(SettingsError, match=r"--ssl-certfile: cannot use .*tls\.crt"):
        checks.check_serve(load(*flags))


def test_an_address_of_another_machine_is_said_at_once() -> None:
    with pytest.raises(SettingsError, match=r"--host: 192\.0\.2\.1 is not an address of this machine"):
        checks.check_serve(load("--host=192.0.2.1", "--port=8000"))
    with pytest.raises(SettingsError, match="--grpc-port: must be at most 65535"):
        checks.check_serve(load("--port=65535"))


def test_more_shared_memory_than_there_is_is_said_at_once() -> None:
    with pytest.raises(SettingsError, match=r"--host-kv-memory: /dev/shm has .* free"):
        checks.check_serve(load("--port=0", "--host-kv-memory=900TiB"))


def test_a_model_that_is_not_there_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="model: there is no /nowhere/model"):
        checks.check_engine(load("/nowhere/model"))
    with pytest.raises(SettingsError, match=r"has no config\.json"):
        checks.check_engine(load(str(tmp_path)))
    with pytest.raises(SettingsError, match=r"there is no weights\.gguf"):
        checks.check_engine(load("weights.gguf"))
    (tmp_path / "config.json").write_text("{}")
    checks.check_engine(load(str(tmp_path)))
    checks.check_engine(load("a-name-to-look-up"))


@pytest.mark.parametrize(
    "config", [{"num_hidden_layers": 3}, {"n_layer": 3}, {"text_config": {"num_hidden_layers": 3}}]
)
def test_more_stages_than_layers_are_refused_before_anything_loads(tmp_path: Path, config: dict[str, object]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    checks.check_model(load("--stages=3"), tmp_path)
    with pytest.raises(SettingsError, match=r"--stages: the model has 3 layers to divide \(got 4\)"):
        checks.check_model(load("--stages=4"), tmp_path)
