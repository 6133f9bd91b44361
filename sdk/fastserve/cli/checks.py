"""What can be known to fail before anything is started. Each check raises SettingsError with one sentence."""

import errno
import json
import os
import socket
import ssl
from pathlib import Path

from fastserve.cli.settings import EngineSettings, ServeSettings
from fastserve_common.segments import SHM_DIR
from fastserve_common.settings import SettingsError
from fastserve_common.units import format_bytes

#: Keys that model families use for their number of layers.
_LAYER_KEYS = ("num_hidden_layers", "n_layer", "num_layers")


def check_engine(settings: EngineSettings) -> None:
    _check_model_path(settings.model)


def check_serve(settings: ServeSettings) -> None:
    check_engine(settings)
    for flag, port in (("--port", settings.port), ("--grpc-port", settings.bound_grpc_port)):
        _check_port(flag, settings.host, port)
    if settings.metrics_port:
        for port in range(settings.metrics_port, settings.metrics_port + 2 + settings.stages):
            _check_port("--metrics-port", "127.0.0.1", port)
    _check_shared_memory(settings.host_kv_memory)
    _check_certificate(settings.ssl_certfile, settings.ssl_keyfile)


def check_model(settings: EngineSettings, model_dir: Path) -> None:
    """Once the model is there: what its configuration rules out."""
    config = json.loads((model_dir / "config.json").read_text())
    config = config.get("text_config", config)
    num_layers = next((config[key] for key in _LAYER_KEYS if key in config), None)
    if num_layers is not None and settings.stages > num_layers:
        raise SettingsError(f"--stages: the model has {num_layers} layers to divide (got {settings.stages})")


def _check_model_path(model: str) -> None:
    """Names without a slash are looked up by the worker; anything that looks like a path must be there."""
    path = Path(model).expanduser()
    looks_like_path = model.startswith((".", "/", "~")) or path.suffix == ".gguf"
    if not looks_like_path and not path.is_dir():
        return
    if not path.exists():
        raise SettingsError(f"model: there is no {model}")
    if path.is_dir() and not (path / "config.json").is_file() and not list(path.glob("*.gguf")):
        raise SettingsError(f"model: {model} has no config.json, so it is not a model's folder")


def _check_port(flag: str, host: str, port: int) -> None:
    if port <= 0:
        return
    if port > 65535:
        raise SettingsError(f"{flag}: must be at most 65535 (got {port})")
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise SettingsError(f"--host: {host} is not an address of this machine: {error.strerror}") from error
    family, kind, proto, _, address = infos[0]
    with socket.socket(family, kind, proto) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: a closing connection is no owner
        try:
            probe.bind(address)
        except OSError as error:
            raise SettingsError(_why_not(flag, host, port, error)) from error


def _why_not(flag: str, host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"{flag}: port {port} of {host} is in use; choose another one"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host: {host} is not an address of this machine"
    return f"{flag}: cannot listen on port {port} of {host}: {error.strerror}"


def _check_certificate(certificate: Path | None, key: Path | None) -> None:
    if certificate is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except OSError as error:  # ssl.SSLError is one
        reason = error.strerror or error
        raise SettingsError(f"--ssl-certfile: cannot use {certificate} with {key}: {reason}") from error


def _check_shared_memory(size_bytes: int) -> None:
    if size_bytes == 0:
        return
    if not SHM_DIR.is_dir():
        raise SettingsError(f"--host-kv-memory: this system has no {SHM_DIR}; set it to 0")
    stats = os.statvfs(SHM_DIR)
    free_bytes = stats.f_bavail * stats.f_frsize
    if size_bytes > free_bytes:
        raise SettingsError(
            f"--host-kv-memory: {SHM_DIR} has {format_bytes(free_bytes)} free (got {format_bytes(size_bytes)})"
        )
