"""`python -m fastserve_kvstore`: the node's host KV daemon."""

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import AsyncIterator

from fastserve.v1 import kvstore_pb2, kvstore_pb2_grpc
from fastserve_common.channels import GrpcServer, advertised_address, full_names
from fastserve_common.lifecycle import EXIT_USAGE, run_service
from fastserve_common.logs import setup_logs
from fastserve_common.metrics import metrics_endpoint
from fastserve_common.settings import SettingsError
from fastserve_common.state import StateError, StateStore, membership, open_state
from fastserve_common.tls import adopt_identity
from fastserve_kvstore.arena import Arena
from fastserve_kvstore.metrics import make_registry
from fastserve_kvstore.service import KvStoreService
from fastserve_kvstore.settings import KvStoreSettings
from fastserve_kvstore.store import HostStore

log = logging.getLogger("fastserve_kvstore")

#: Calls in progress at shutdown have this long.
_STOP_GRACE_S = 1.0


async def serve(settings: KvStoreSettings, stop: asyncio.Event) -> None:
    """Until `stop` is set. Raises SettingsError, OSError or StateError when it cannot start."""
    async with contextlib.AsyncExitStack() as stack:
        state = open_state(settings.state)
        stack.push_async_callback(state.close)
        arena = await asyncio.to_thread(Arena.open, settings.host_kv_memory, settings.lock_memory)
        stack.callback(arena.close)
        # A store that was wiped would count from one again, and new memory would pass for what was there before.
        start_number = await state.increment(f"kvstore-starts:{settings.node}", least=int(time.time()))
        store = HostStore(arena.kv_bytes, start_number, round(settings.lease_ttl_s * 1e9))
        stack.enter_context(metrics_endpoint(settings.metrics_listen, make_registry(store, arena)))
        address = await stack.enter_async_context(_serving(KvStoreService(store, arena), settings))
        await stack.enter_async_context(_registered(state, settings.node, address, arena, store))
        log.info("ready", extra={"address": address, "segment": arena.name, "page_locked": arena.page_locked})
        await stop.wait()


@contextlib.asynccontextmanager
async def _serving(service: KvStoreService, settings: KvStoreSettings) -> AsyncIterator[str]:
    server = GrpcServer.create(full_names(kvstore_pb2.DESCRIPTOR))
    kvstore_pb2_grpc.add_KvStoreServicer_to_server(service, server.server)
    port = await server.start(settings.listen)
    await server.set_serving(True)
    expiry = asyncio.create_task(service.expire_leases())
    try:
        yield advertised_address(settings.listen, port, settings.advertise)
    finally:
        expiry.cancel()
        service.close()
        await server.stop(_STOP_GRACE_S)


def _registered(
    state: StateStore, node: str, address: str, arena: Arena, store: HostStore
) -> contextlib.AbstractAsyncContextManager[None]:
    facts = {"address": address, "segment": arena.name, "generation": str(store.generation)}
    return membership(state, "kvstore", node, facts)


def main(argv: list[str]) -> int:
    try:
        settings = KvStoreSettings.load(argv, prog="python -m fastserve_kvstore")
        setup_logs("kvstore", level=settings.log_level, log_format=settings.log_format)
        adopt_identity(settings)
        return run_service(lambda stop: serve(settings, stop))
    except (SettingsError, StateError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - the one sentence of a failed start
        return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
