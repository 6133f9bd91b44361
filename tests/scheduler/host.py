"""The node's kvstore, served in this process by its own code on real shared memory."""

import asyncio
from types import TracebackType
from typing import Self

from fastserve.v1 import kvstore_pb2, kvstore_pb2_grpc
from fastserve_common.channels import open_channel
from fastserve_common.state import StateStore
from fastserve_kvstore.__main__ import serve
from fastserve_kvstore.settings import KvStoreSettings

from .rig import PATIENCE_S, until_async

NODE = "node"


class KvStore:
    """`async with KvStore(url, store, num_bytes) as kvstore`: registered; may be killed and started again."""

    def __init__(self, url: str, store: StateStore, num_bytes: int, *flags: str) -> None:
        self._store = store
        self._flags = ["--state", url, "--node", NODE, "--host-kv-memory", str(num_bytes), *flags]
        self._task: asyncio.Task[None] | None = None
        self.address = ""

    async def start(self) -> None:
        """Another life of it, if it had one."""
        before = (await self._store.members("kvstore")).get(NODE)
        self._task = asyncio.create_task(serve(KvStoreSettings.load(self._flags, prog="kvstore"), asyncio.Event()))

        async def found() -> bool:
            assert self._task is not None
            if self._task.done():
                self._task.result()
            facts = (await self._store.members("kvstore")).get(NODE)
            if facts in (None, before):
                return False
            assert facts is not None
            self.address = facts["address"]
            return True

        await until_async(found)

    async def kill(self) -> None:
        """Its streams break, its slots are gone. (Its membership ends at once, so that tests need not wait.)"""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=PATIENCE_S)

    async def status(self) -> kvstore_pb2.GetStatusResponse:
        async with open_channel(self.address) as channel:
            return await kvstore_pb2_grpc.KvStoreStub(channel).GetStatus(kvstore_pb2.GetStatusRequest())

    async def attach(self, slot_bytes: int) -> kvstore_pb2.AttachResponse:
        """As the only stage of a pipeline would."""
        layout = kvstore_pb2.KvLayout(model_fingerprint="m", slot_bytes=slot_bytes)
        async with open_channel(self.address) as channel:
            request = kvstore_pb2.AttachRequest(owner="stage-0", layout=layout, pipeline_slot_bytes=slot_bytes)
            return await kvstore_pb2_grpc.KvStoreStub(channel).Attach(request)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kill()
