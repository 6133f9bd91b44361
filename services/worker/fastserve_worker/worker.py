"""The worker process: listen, load, register, serve until told to stop, leave in order."""

import asyncio
import contextlib
import logging
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import TYPE_CHECKING, TypeVar, cast

from fastserve_common.metrics import metrics_endpoint
from fastserve_common.state import StateError, StateStore, membership, open_state, rank_member
from fastserve_worker.backend import StageBackend
from fastserve_worker.fake_stage import FakeOptions, FakeStage
from fastserve_worker.messages import StageInfo
from fastserve_worker.metrics import StageMetrics
from fastserve_worker.ranks.errors import RankLostError
from fastserve_worker.ranks.followers import Followers
from fastserve_worker.service import StageServer
from fastserve_worker.settings import WorkerSettings
from fastserve_worker.sizing import count_blocks
from fastserve_worker.swap.arena_map import HostLink

if TYPE_CHECKING:
    from fastserve_worker.ranks.meeting import Meeting

log = logging.getLogger(__name__)

T = TypeVar("T")

EXIT_FAILED = 1
EXIT_SETTINGS = 2

ROLE = "stage"
#: Of ranks other than the first, which nobody but that one speaks to.
RANK_ROLE = "rank"

#: The stage's thread holds the interpreter between tensor operations; at the default of 5 ms a report or a health
#: check would wait that long for its turn.
SWITCH_INTERVAL_S = 0.0005

#: How often an absent state store is tried before the stage is registered.
STATE_RETRY_S = 1.0

#: A fake token's share of --kv-memory, and the fake model's length.
FAKE_TOKEN_KV_BYTES = 1024
FAKE_MODEL_LEN = 4096


async def run_worker(settings: WorkerSettings, stop: asyncio.Event) -> int:
    """Until `stop`. The exit status: 2, after a sentence in the log, when settings or model cannot be served; 1 for
    what nobody foresaw."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        store = open_state(settings.state)
        metrics = StageMetrics(settings.stage)
        server = StageServer(settings.stall_timeout, metrics=metrics)
        port = await server.start(settings.listen)
    except (ValueError, OSError) as error:
        log.error("%s", error)
        return EXIT_SETTINGS
    try:
        with metrics_endpoint(settings.metrics_listen, metrics.registry):
            async with contextlib.AsyncExitStack() as exits:
                meeting = await _meeting(exits, store, settings, port, stop)
                if not stop.is_set() and await _load(server, settings, meeting, stop) is not None:
                    if meeting is not None and settings.tensor_parallel_rank == 0:
                        await exits.enter_async_context(_leading(server, meeting))
                    await exits.enter_async_context(_host_memory(store, server, settings))
                    await _serve(store, server, settings, port, stop)
    except RankLostError as error:
        log.error("this rank ends with its stage: %s", error)
        return EXIT_FAILED
    except ValueError as error:  # SettingsError, UnsupportedModelError
        log.error("%s", error)
        return EXIT_SETTINGS
    except Exception:  # a damaged checkpoint, memory that is not there: the log says more than a sentence could
        log.exception("the stage failed")
        return EXIT_FAILED
    finally:
        await server.stop()
        await store.close()
    return 0


async def _load(
    server: StageServer, settings: WorkerSettings, meeting: "Meeting | None", stop: asyncio.Event
) -> StageInfo | None:
    """None when told to stop meanwhile."""
    return await _unless_stopped(server.load(backend_maker(settings, meeting)), stop)


async def _unless_stopped(work: Coroutine[object, object, T], stop: asyncio.Event) -> T | None:
    """None when told to stop meanwhile; the work is cancelled then."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if working.done():
        return working.result()
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    return None


async def _meeting(
    exits: contextlib.AsyncExitStack, store: StateStore, settings: WorkerSettings, port: int, stop: asyncio.Event
) -> "Meeting | None":
    """Where the ranks of this stage come together; None where it has one only, or when told to stop meanwhile."""
    if settings.tensor_parallel_size == 1:
        return None
    from fastserve_worker.ranks.meeting import meeting

    place = meeting(store, settings, settings.address(port))
    return await _unless_stopped(exits.enter_async_context(place), stop)


@contextlib.asynccontextmanager
async def _leading(server: StageServer, meeting: "Meeting") -> AsyncIterator[None]:
    """Rank 0 speaks for the others while the block runs; the stage is broken when one of them is lost."""
    stage = server.stage
    assert stage is not None
    followers = Followers(await meeting.addresses())
    stage.lead(followers)
    task = asyncio.create_task(followers.run(), name="followers")
    task.add_done_callback(lambda done: None if done.cancelled() else stage.break_up(str(done.exception())))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@contextlib.asynccontextmanager
async def _host_memory(store: StateStore, server: StageServer, settings: WorkerSettings) -> AsyncIterator[None]:
    """Attached to the node's kvstore while the block runs, whenever there is one. The first attempt is made before
    this stage can be found: a scheduler that configures it learns at once what it can swap with."""
    assert server.stage is not None
    shape = server.stage.copier.memory.shape
    link = HostLink(
        store,
        settings.node,
        server.stage.info,
        shape,
        checksums=settings.kv_checksums,
        replica=settings.replica,
        group=settings.group,
        use=server.attach_host,
    )
    await link.refresh()
    task = asyncio.create_task(link.run(), name="host-memory")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _serve(
    store: StateStore, server: StageServer, settings: WorkerSettings, port: int, stop: asyncio.Event
) -> None:
    """Until told to stop. Raises RankLostError when the ranks cannot go on together."""
    assert server.stage is not None
    info, address = server.stage.info, settings.address(port)
    facts = {
        "address": address,
        "replica": str(settings.replica),
        "stage": str(info.stage),
        "num_stages": str(info.num_stages),
        "rank": str(info.rank),
        "num_ranks": str(info.num_ranks),
        "incarnation": uuid.uuid4().hex,
        "fingerprint": info.fingerprint,
        "device": info.device,
        "dtype": info.dtype,
    }
    await _wait_for_store(store, stop)
    if stop.is_set():
        return
    role, name = RANK_ROLE if info.rank else ROLE, rank_member(settings.replica, info.stage, info.rank, settings.group)
    async with membership(store, role, name, facts):
        log.info("serving", extra={"address": address, "num_blocks": info.num_blocks, "len": info.max_model_len})
        stopping: asyncio.Future[object] = asyncio.ensure_future(stop.wait())
        broken = cast("asyncio.Future[object]", server.stage.broken)
        await asyncio.wait({stopping, broken}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
    if server.stage.broken.done() and not stop.is_set():
        raise RankLostError(server.stage.broken.result())
    log.info("stopping")


async def _wait_for_store(store: StateStore, stop: asyncio.Event) -> None:
    """A loaded model is not thrown away because the store is late."""
    while not stop.is_set():
        try:
            await store.members(ROLE)
            return
        except StateError as error:
            log.warning("the state store is away, will retry: %s", error)
            await asyncio.wait({asyncio.create_task(stop.wait())}, timeout=STATE_RETRY_S)


def backend_maker(settings: WorkerSettings, meeting: "Meeting | None" = None) -> Callable[[], StageBackend]:
    """What loads the stage, for the stage's own thread; torch is imported there, and only if it is needed."""
    if settings.fake:
        return lambda: _fake(settings)

    def load() -> StageBackend:
        from fastserve_worker.torch_stage import TorchStage

        return TorchStage.load(settings, meeting.join if meeting else None)

    return load


def _fake(settings: WorkerSettings) -> FakeStage:
    max_model_len = settings.max_model_len or FAKE_MODEL_LEN
    num_blocks = count_blocks(
        kv_memory=settings.kv_memory,
        block_bytes=settings.block_size * FAKE_TOKEN_KV_BYTES,
        block_size=settings.block_size,
        max_model_len=max_model_len,
    )
    options = FakeOptions(
        vocab_size=settings.fake_vocab_size,
        iteration_ns=int(settings.fake_iteration_ms * 1e6),
        token_ns=int(settings.fake_token_us * 1e3),
        swap_ns=int(settings.fake_swap_ms * 1e6),
    )
    return FakeStage(
        stage=settings.stage,
        num_stages=settings.num_stages,
        num_blocks=num_blocks,
        block_size=settings.block_size,
        max_model_len=max_model_len,
        options=options,
    )
