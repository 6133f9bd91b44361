"""Mutual TLS between services: who is let in, who is not, renewal, and settings that cannot be used."""

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fastserve_common.channels import GrpcServer, open_channel
from fastserve_common.healthcheck import EXIT_UNHEALTHY, EXIT_USAGE, main
from fastserve_common.settings import SettingsError
from fastserve_common.tls import ClusterSettings, Identity, adopt_identity, identity

from .certificates import Authority, flags

SERVING = health_pb2.HealthCheckResponse.SERVING


def adopt(who: Identity | None) -> None:
    adopt_identity(ClusterSettings.load(flags(who) if who else (), prog="test"))


@pytest.fixture(autouse=True)
def nobody() -> Iterator[None]:
    yield
    adopt(None)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("ca"))


@asynccontextmanager
async def serving(who: Identity | None) -> AsyncIterator[str]:
    adopt(who)
    server = GrpcServer.create([])
    port = await server.start("127.0.0.1:0")
    await server.set_serving(True)
    yield f"127.0.0.1:{port}"
    await server.stop(0)


async def ask(channel: grpc.aio.Channel) -> int:
    """The status; raises AioRpcError."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return int((await stub.Check(health_pb2.HealthCheckRequest(), timeout=20)).status)


async def refused(address: str, who: Identity | None) -> str:
    adopt(who)
    async with open_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await ask(channel)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    return str(error.value.details())


async def test_services_of_one_authority_understand_each_other(authority: Authority) -> None:
    async with serving(authority.sign("scheduler")) as address:
        adopt(authority.sign("stage-0"))
        async with open_channel(address) as channel:
            assert await ask(channel) == SERVING


async def test_whoever_shows_no_certificate_is_refused(authority: Authority) -> None:
    async with serving(authority.sign("scheduler")) as address:
        await refused(address, None)
        only_trust = grpc.ssl_channel_credentials(authority.certificate.read_bytes())
        override = (("grpc.ssl_target_name_override", "fastserve.internal"),)
        async with grpc.aio.secure_channel(address, only_trust, options=override) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await ask(channel)


async def test_a_certificate_of_another_authority_is_refused_by_either_end(
    authority: Authority, tmp_path: Path
) -> None:
    stranger = Authority.make(tmp_path / "other").sign("stage-0")
    async with serving(authority.sign("scheduler")) as address:
        await refused(address, stranger)  # does not believe the server
        # Believes it, and is not believed.
        await refused(address, Identity(stranger.certificate, stranger.key, authority.certificate))
    async with serving(None) as address:
        await refused(address, authority.sign("stage-0"))


async def test_the_name_must_be_the_clusters(authority: Authority) -> None:
    async with serving(authority.sign("web", "DNS:www.example.com")) as address:
        await refused(address, authority.sign("stage-0"))


async def test_a_renewed_certificate_is_used_without_a_restart(authority: Authority) -> None:
    me = authority.sign("renewed")
    async with serving(me) as address:
        host, _, port = address.partition(":")

        def shown() -> str:
            context = ssl.create_default_context(cafile=str(authority.certificate))
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            context.load_cert_chain(me.certificate, me.key)
            context.set_alpn_protocols(["h2"])
            with socket.create_connection((host, int(port))) as raw, context.wrap_socket(raw) as secure:
                certificate = secure.getpeercert(binary_form=True)
                assert certificate is not None
                return ssl.DER_cert_to_PEM_cert(certificate)

        before = await asyncio.to_thread(shown)
        authority.sign("renewed")
        after = await asyncio.to_thread(shown)
        assert before != after
        assert after.strip() in me.certificate.read_text()


async def test_probes_show_the_services_certificate(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    me = authority.sign("scheduler")
    async with serving(me) as address:

        async def probe(*argv: str) -> int:
            return await asyncio.to_thread(main, [address, *argv])

        assert await probe() == EXIT_UNHEALTHY
        assert await probe(*flags(me)) == 0
        assert await probe(flags(me)[0]) == EXIT_USAGE
        assert "must be given together" in capsys.readouterr().err
        for name, path in (("CERT", me.certificate), ("KEY", me.key), ("CA", me.authority)):
            monkeypatch.setenv(f"FASTSERVE_TLS_{name}", str(path))
        assert await probe() == 0


def test_without_settings_nothing_is_asked_for() -> None:
    adopt_identity(ClusterSettings.load(["--tls-cert=", "--tls-key="], prog="test"))
    assert identity() is None


def test_half_an_identity_is_refused() -> None:
    with pytest.raises(SettingsError, match="must be given together"):
        ClusterSettings.load(["--tls-cert=x"], prog="test")


def test_files_that_cannot_be_used_are_one_sentence(authority: Authority, tmp_path: Path) -> None:
    me, other = authority.sign("a"), authority.sign("b")
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("no certificate")
    for cert, key, ca, problem in (
        (tmp_path / "none", me.key, me.authority, "--tls-cert: cannot use .*none"),
        (me.certificate, other.key, me.authority, "--tls-cert: cannot use"),
        (me.certificate, me.key, garbage, "--tls-ca: cannot use .*garbage"),
    ):
        with pytest.raises(SettingsError, match=problem):
            adopt(Identity(cert, key, ca))
    assert identity() is None


async def test_a_file_that_vanishes_costs_nothing_but_renewal(authority: Authority) -> None:
    me = authority.sign("vanishing")
    async with serving(me) as address:
        client = authority.sign("client")
        os.rename(me.key, me.key.with_suffix(".away"))
        adopt(client)
        async with open_channel(address) as channel:
            assert await ask(channel) == SERVING
