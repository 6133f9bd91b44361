"""A network between two processes that can swallow everything, without a word to either."""

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Network:
    """A port that leads to another one while `whole` is set; what is on its way otherwise stays there."""

    def __init__(self, target: str) -> None:
        self._host, _, self._port = target.rpartition(":")
        self.whole = asyncio.Event()
        self.whole.set()
        #: Pieces that arrived, of both directions.
        self.num_carried = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._host, int(self._port))
        for source, sink in ((reader, back), (there, writer)):
            self._tasks.add(asyncio.create_task(self._carry(source, sink)))

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65_536):
                await self.whole.wait()
                sink.write(data)
                await sink.drain()
                self.num_carried += 1
        except OSError:
            pass  # one end is gone; so is the other, below
        finally:
            sink.close()
