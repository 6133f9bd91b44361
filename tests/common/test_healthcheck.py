"""The probe against a real server: what it says, and its exit status."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from fastserve_common.channels import GrpcServer
from fastserve_common.healthcheck import EXIT_UNHEALTHY, main

SERVICE = "fastserve.v1.Example"


@pytest.fixture
async def server() -> AsyncIterator[tuple[GrpcServer, str]]:
    server = GrpcServer.create([SERVICE])
    port = await server.start("127.0.0.1:0")
    yield server, f"127.0.0.1:{port}"
    await server.stop(0)


async def probe(*argv: str) -> int:
    return await asyncio.to_thread(main, argv)


async def test_a_server_that_serves_is_healthy(server: tuple[GrpcServer, str]) -> None:
    await server[0].set_serving(True)
    assert await probe(server[1]) == 0
    assert await probe(server[1], "--service", SERVICE) == 0


async def test_one_that_does_not_is_unhealthy_yet_alive(
    server: tuple[GrpcServer, str], capsys: pytest.CaptureFixture[str]
) -> None:
    await server[0].set_serving(False)
    assert await probe(server[1]) == EXIT_UNHEALTHY
    assert capsys.readouterr().err == f"fastserve-healthcheck: {server[1]} says NOT_SERVING\n"
    assert await probe(server[1], "--any-answer") == 0


async def test_a_service_that_is_not_there_is_unhealthy(
    server: tuple[GrpcServer, str], capsys: pytest.CaptureFixture[str]
) -> None:
    await server[0].set_serving(True)
    assert await probe(server[1], "--service", "no.such.Service", "--any-answer") == EXIT_UNHEALTHY
    assert "NOT_FOUND" in capsys.readouterr().err


async def test_nobody_there_is_unhealthy(server: tuple[GrpcServer, str], capsys: pytest.CaptureFixture[str]) -> None:
    await server[0].stop(0)
    assert await probe(server[1], "--any-answer", "--timeout", "5") == EXIT_UNHEALTHY
    assert "did not answer: UNAVAILABLE" in capsys.readouterr().err


async def test_settings_of_the_service_do_not_disturb_it(
    server: tuple[GrpcServer, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTSERVE_CONFIG", "/no/such/file.toml")
    monkeypatch.setenv("FASTSERVE_TIMEOUT", "never")
    await server[0].set_serving(True)
    assert await probe(server[1]) == 0
