"""A Redis with a password, and one that speaks TLS only: one URL says it all, and no error repeats the password."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.conftest import free_port

from fastserve_common.settings import SettingsError
from fastserve_common.state import StateError, open_state, without_password

from .redis_process import RedisProcess

PASSWORD = "s3cret-of-the-store"


def tool(name: str, skip_or_fail: Callable[[str], None]) -> str:
    found = shutil.which(name)
    if found is None:
        skip_or_fail(f"{name} is not installed")
    return str(found)


async def works(url: str) -> bool:
    store = open_state(url)
    try:
        await store.register("stage", "stage-0", {"address": "a"})
        return await store.members("stage") == {"stage-0": {"address": "a"}}
    finally:
        await store.close()


async def test_a_password_in_the_url_is_used(tmp_path: Path, skip_or_fail: Callable[[str], None]) -> None:
    port = free_port()
    url = f"redis://:{PASSWORD}@127.0.0.1:{port}/0"
    flags = ["--port", str(port), "--requirepass", PASSWORD]
    with RedisProcess(tool("redis-server", skip_or_fail), tmp_path, port, flags=flags, url=url):
        assert await works(url)
        with pytest.raises(StateError) as refused:
            await works(url.replace(PASSWORD, "another"))
        assert PASSWORD not in str(refused.value)
        with pytest.raises(StateError, match=r"(?i)authenticat"):
            await works(f"redis://127.0.0.1:{port}/0")


def certificates(folder: Path, openssl: str) -> None:
    """`ca.pem`, and `server.pem` with `server.key` signed by it for 127.0.0.1."""

    def run(*args: str) -> None:
        subprocess.run([openssl, *args], check=True, capture_output=True, cwd=folder)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    run("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test CA", "-days", "1")
    run("req", *key, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=redis")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1")
    sign = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "1", "-extfile", "names")
    run("x509", "-req", "-in", "server.csr", "-out", "server.pem", *sign)


async def test_tls_is_spoken_with_a_ca_of_ones_own(tmp_path: Path, skip_or_fail: Callable[[str], None]) -> None:
    certificates(tmp_path, tool("openssl", skip_or_fail))
    port = free_port()
    address = f"rediss://127.0.0.1:{port}/0"
    url = f"{address}?ssl_ca_certs={tmp_path / 'ca.pem'}"
    flags = ["--port", "0", "--tls-port", str(port), "--tls-auth-clients", "no"]
    for flag, name in (("cert", "server.pem"), ("key", "server.key"), ("ca-cert", "ca.pem")):
        flags += [f"--tls-{flag}-file", str(tmp_path / name)]
    with RedisProcess(tool("redis-server", skip_or_fail), tmp_path, port, flags=flags, url=url):
        assert await works(url)
        with pytest.raises(StateError):  # a CA that nobody vouched for
            await works(address)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"redis://:{PASSWORD}@host:1/0", "redis://:***@host:1/0"),
        (f"rediss://user:{PASSWORD}@host/0", "rediss://user:***@host/0"),
        ("redis://host:1/0", "redis://host:1/0"),
        ("sqlite:///path", "sqlite:///path"),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, shown: str) -> None:
    assert without_password(url) == shown


def test_an_error_about_the_url_does_not_repeat_the_password() -> None:
    with pytest.raises(SettingsError) as refused:
        open_state(f"redos://:{PASSWORD}@host:1")
    assert PASSWORD not in str(refused.value)
