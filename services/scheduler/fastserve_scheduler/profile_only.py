"""`--profile-only`: measure a full profile of the stages that are up, store it, show it, end."""

import asyncio
import logging
import sys
import time
import uuid

from fastserve_common.state import StateStore, open_state
from fastserve_scheduler.core.profile import Profile
from fastserve_scheduler.inbox import Inbox
from fastserve_scheduler.inputs import FromStage, Input, Joined, Lost, PipelineChanged
from fastserve_scheduler.leadership import Leadership
from fastserve_scheduler.messages import Measured, Ready
from fastserve_scheduler.pipeline import Pipeline
from fastserve_scheduler.profiler import ProfileError, Profiler, ProfileStore
from fastserve_scheduler.settings import SchedulerSettings

log = logging.getLogger(__name__)

EXIT_FAILED = 1
_NS_PER_MS = 1e6


async def run(settings: SchedulerSettings, stop: asyncio.Event) -> int:
    """0 when the profile was measured and stored. The last line of standard output is the file's path."""
    store = open_state(settings.state)
    leadership = Leadership(store, uuid.uuid4().hex, settings.group)
    try:
        generation = await leadership.try_acquire()
        if generation is None:
            log.error("a scheduler leads these stages; measure when it is not running")
            return EXIT_FAILED
        keep = asyncio.create_task(leadership.keep(), name="leadership")
        try:
            return await _measure(settings, store, generation, stop)
        finally:
            keep.cancel()
            await asyncio.gather(keep, return_exceptions=True)
            await leadership.give_up()
    finally:
        await store.close()


async def _measure(settings: SchedulerSettings, store: StateStore, generation: int, stop: asyncio.Event) -> int:
    inbox: Inbox[Input] = Inbox()
    pipeline = Pipeline(store, settings.num_stages, generation, inbox, time.monotonic, group=settings.group)
    profiler = Profiler(ProfileStore(settings.profile_dir), pipeline.send_measure, settings.max_num_seqs, full=True)
    work = asyncio.create_task(pipeline.run(), name="pipeline")
    measuring = asyncio.create_task(_obtain(inbox, pipeline, profiler), name="measure")
    stopped = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait([measuring, stopped], return_when=asyncio.FIRST_COMPLETED)
        if not measuring.done():
            return EXIT_FAILED
        stages, profile = measuring.result()
        sys.stdout.write(f"{table(profile)}\n{profiler.path_for(stages)}\n")
        return 0
    except ProfileError as error:
        log.error("no profile: %s", error)
        return EXIT_FAILED
    finally:
        for task in (work, measuring, stopped):
            task.cancel()
        await asyncio.gather(work, measuring, stopped, return_exceptions=True)


async def _obtain(inbox: Inbox[Input], pipeline: Pipeline, profiler: Profiler) -> tuple[tuple[Ready, ...], Profile]:
    """Raises ProfileError, also when a stage is lost meanwhile."""
    measuring: asyncio.Task[Profile] | None = None
    stages: tuple[Ready, ...] = ()
    while True:
        match await inbox.get():
            case Joined(epoch, joined) if measuring is None and epoch == pipeline.epoch:
                stages = joined
                measuring = asyncio.create_task(profiler.obtain(stages, epoch))
                measuring.add_done_callback(lambda _: inbox.put_now(PipelineChanged()))
            case FromStage(stage, Measured() as answer):
                profiler.on_measured(stage, answer)
            case Lost(stage, why) if measuring is not None:
                measuring.cancel()
                raise ProfileError(f"lost stage {stage}: {why}")
            case PipelineChanged():
                if measuring is not None and measuring.done():
                    return stages, measuring.result()
                if pipeline.detail:
                    log.info(pipeline.detail)


def table(profile: Profile) -> str:
    """For people."""
    lines = ["prefill tokens          ms"]
    lines += [f"{tokens:14d} {ns / _NS_PER_MS:11.3f}" for tokens, ns in profile.prefill]
    lines += ["", "decode sequences  context          ms"]
    lines += [f"{n:16d} {context:8d} {ns / _NS_PER_MS:11.3f}" for n, context, ns in profile.decode]
    return "\n".join(lines)
