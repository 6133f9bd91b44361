"""When a child is ready: it has registered, and a gateway also says so itself."""

import asyncio
import contextlib
from collections.abc import Mapping

from fastserve.cli.specs import ChildSpec
from fastserve_common.state import StateStore

_POLL_S = 0.1
_HTTP_TIMEOUT_S = 5.0

#: A server that listens on every interface is reached by one of them.
_ANY_HOST = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]", "": "127.0.0.1"}


async def registered(state: StateStore, spec: ChildSpec) -> Mapping[str, str]:
    """Waits until it is a member; returns what it says of itself."""
    while True:
        members = await state.members(spec.role)
        if spec.member in members:
            return members[spec.member]
        if members and not spec.member:
            return next(iter(members.values()))
        await asyncio.sleep(_POLL_S)


async def gateway_ready(http_address: str) -> None:
    """Waits until GET /health/ready answers 200."""
    host, _, port = http_address.rpartition(":")
    while not await _is_ok(_ANY_HOST.get(host, host).strip("[]"), int(port)):  # noqa: ASYNC110 - another process's state
        await asyncio.sleep(_POLL_S)


async def _is_ok(host: str, port: int) -> bool:
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(_HTTP_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(f"GET /health/ready HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
                status_line = await reader.readline()
                return status_line.split()[1:2] == [b"200"]
            finally:
                writer.close()
    return False
