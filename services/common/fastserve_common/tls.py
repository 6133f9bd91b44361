"""Mutual TLS between the services: one identity for a process, used by every internal server and channel.

Each end shows a certificate that the cluster's own authority signed; whoever has none is refused in the handshake.
Processes move between addresses, so no certificate names one: all carry one name, `--tls-name`, and clients insist
on it. Files are read again for every handshake of a server and every channel, so that certificates are renewed by
replacing them.
"""

import argparse
import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import grpc
from pydantic import Field, field_validator, model_validator

from fastserve_common.settings import ENV_PREFIX, Settings, SettingsError

#: What certificates of the cluster carry as a DNS name, unless told otherwise.
DEFAULT_NAME = "fastserve.internal"


class ClusterSettings(Settings):
    """Base of the settings of everything that speaks to services: how they know each other."""

    tls_cert: Path | None = Field(None, description="certificate chain (PEM) that other services are shown")
    tls_key: Path | None = Field(None, description="its private key (PEM)")
    tls_ca: Path | None = Field(None, description="authority (PEM) that other services' certificates must be signed by")
    tls_name: str = Field(DEFAULT_NAME, min_length=1, description="DNS name in the certificates of all services")
    otlp_endpoint: str = Field(
        "", description="send traces to this OTLP gRPC collector, http(s)://host:4317 (default: $OTEL_EXPORTER_OTLP_*)"
    )

    @field_validator("tls_cert", "tls_key", "tls_ca", mode="before")
    @classmethod
    def _empty_is_none(cls, value: object) -> object:
        return value or None  # a variable of a Compose file that is not set

    @model_validator(mode="after")
    def _all_or_none(self) -> Self:
        if len({path is None for path in (self.tls_cert, self.tls_key, self.tls_ca)}) > 1:
            raise ValueError("--tls-cert, --tls-key and --tls-ca must be given together")
        return self


@dataclass(frozen=True, slots=True)
class Identity:
    """What a process shows others, and whom it believes."""

    certificate: Path
    key: Path
    authority: Path
    name: str = DEFAULT_NAME

    def check(self) -> None:
        """Raises SettingsError, with a sentence, for files that cannot be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        _try("--tls-cert", self.certificate, lambda: context.load_cert_chain(self.certificate, self.key))
        _try("--tls-ca", self.authority, lambda: context.load_verify_locations(self.authority))

    def server_credentials(self) -> grpc.ServerCredentials:
        """Clients need a certificate. Read again for each handshake."""
        fetch = self._configuration
        return grpc.dynamic_ssl_server_credentials(fetch(), fetch, require_client_authentication=True)

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        pair = (self.key.read_bytes(), self.certificate.read_bytes())
        return grpc.ssl_server_certificate_configuration([pair], self.authority.read_bytes())

    def channel_credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(
            self.authority.read_bytes(), self.key.read_bytes(), self.certificate.read_bytes()
        )


def _try(flag: str, path: Path, load: Callable[[], None]) -> None:
    try:
        load()
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise SettingsError(f"{flag}: cannot use {path}: {reason}") from error


_identity: Identity | None = None


def adopt_identity(settings: ClusterSettings) -> None:
    """Make the settings' certificates this process's; without them it speaks in the clear. Raises SettingsError."""
    if settings.tls_cert is None or settings.tls_key is None or settings.tls_ca is None:
        adopt(None)
    else:
        adopt(Identity(settings.tls_cert, settings.tls_key, settings.tls_ca, settings.tls_name))


def adopt(identity: Identity | None) -> None:
    """Make it this process's; None: it speaks in the clear. Raises SettingsError for files that cannot be used."""
    global _identity  # a process has one, like one root logger
    if identity is not None:
        identity.check()
    _identity = identity


def add_tls_arguments(parser: argparse.ArgumentParser) -> None:
    """`--tls-*` for commands that visit a cluster and have no settings class; the services' variables are defaults."""
    texts = {
        "cert": "certificate chain (PEM) that the services are shown",
        "key": "its private key (PEM)",
        "ca": "authority (PEM) of the services' certificates",
        "name": f"DNS name in the services' certificates (default: {DEFAULT_NAME})",
    }
    for name, text in texts.items():
        value = os.environ.get(f"{ENV_PREFIX}TLS_{name.upper()}") or (DEFAULT_NAME if name == "name" else "")
        metavar = "NAME" if name == "name" else "FILE"
        parser.add_argument(f"--tls-{name}", default=value, metavar=metavar, help=text)


def given_identity(args: argparse.Namespace) -> Identity | None:
    """What `add_tls_arguments` was given; None: nothing. Raises SettingsError when some of it is missing."""
    given = [args.tls_cert, args.tls_key, args.tls_ca]
    if not any(given):
        return None
    if not all(given):
        raise SettingsError("--tls-cert, --tls-key and --tls-ca must be given together")
    certificate, key, authority = map(Path, given)
    return Identity(certificate, key, authority, args.tls_name)


def identity() -> Identity | None:
    """None: in the clear."""
    return _identity


def public_server_credentials(certificate: Path, key: Path) -> grpc.ServerCredentials:
    """For a server that anybody may connect to. Read again for each handshake."""

    def configuration() -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(key.read_bytes(), certificate.read_bytes())])

    return grpc.dynamic_ssl_server_credentials(configuration(), configuration, False)
