"""A server that takes any stream and never ends it; `python -m tests.links.peer` is one in a process of its own."""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from fastserve_common.channels import GrpcServer

Context = grpc.aio.ServicerContext[Any, Any]


#: Every stream between services.
METHODS = {"Stage": ("Control", "Forward"), "KvStore": ("Control",), "Scheduler": ("Connect",)}


class SilentPeer:
    """Says `greeting`, if any, and from then on echoes what it hears, if it is to."""

    def __init__(self, greeting: bytes = b"", *, echoes: bool = False) -> None:
        self._greeting, self._echoes = greeting, echoes
        self._server = GrpcServer.create(())
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(self._hold)
        for service, methods in METHODS.items():
            handlers = grpc.method_handlers_generic_handler(f"fastserve.v1.{service}", dict.fromkeys(methods, handler))
            self._server.server.add_generic_rpc_handlers((handlers,))
        self.opened = asyncio.Event()
        self.num_open = 0

    async def start(self) -> str:
        return f"127.0.0.1:{await self._server.start('127.0.0.1:0')}"

    async def stop(self) -> None:
        await self._server.stop(0)

    async def _hold(self, requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        self.num_open += 1
        self.opened.set()
        try:
            if self._greeting:
                yield self._greeting
            async for request in requests:
                if self._echoes:
                    yield request
        finally:
            self.num_open -= 1


async def main() -> None:
    sys.stdout.write(await SilentPeer(echoes=True).start() + "\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
