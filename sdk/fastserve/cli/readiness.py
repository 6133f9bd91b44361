"""When a child is ready: it has registered, and a gateway also says so itself."""

import asyncio
import json
import ssl
from collections.abc import Callable, Mapping
from http import HTTPStatus

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


async def gateway_ready(http_address: str, tell: Callable[[str], None], *, tls: bool = False) -> None:
    """Waits until GET /health/ready answers 200; tells why it does not, when that changes."""
    host, _, port = http_address.rpartition(":")
    host, reason = _ANY_HOST.get(host, host).strip("[]"), ""
    context = _unchecked() if tls else None
    while True:
        status, text = await _get(host, int(port), "/health/ready", context)
        if status == HTTPStatus.OK:
            return
        if text and text != reason:
            tell(text)
        reason = text
        await asyncio.sleep(_POLL_S)


def _unchecked() -> ssl.SSLContext:
    """The gateway is our own child; which names and authorities its certificate has is for its callers."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def _get(host: str, port: int, path: str, context: ssl.SSLContext | None) -> tuple[int, str]:
    """The status, and what an error's body says; 0 when nobody answers."""
    try:
        async with asyncio.timeout(_HTTP_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port, ssl=context)
            try:
                writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
                head, _, body = (await reader.read()).partition(b"\r\n\r\n")
                return int(head.split()[1]), _reason(body)
            finally:
                writer.close()
    except (OSError, TimeoutError, IndexError, ValueError):
        return 0, ""


def _reason(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""
