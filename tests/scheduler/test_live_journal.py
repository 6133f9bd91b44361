"""A live run is written down completely: it replays without stages, gateways or a clock."""

import os
import shutil
from pathlib import Path

from fastserve_scheduler.journal import segments
from fastserve_scheduler.journal_reader import replay

from .rig import Cluster, until
from .stages import oracle

JOURNALS = Path(__file__).parents[1] / "replay" / "journals"


async def test_a_live_run_with_losses_aborts_and_preemptions_replays(tmp_path: Path) -> None:
    """FASTSERVE_RECORD_JOURNALS=1 keeps it for tests/replay, for when the core is meant to decide otherwise."""
    journal = tmp_path / "live.jsonl"
    flags = ["--journal", str(journal), "--max-num-seqs", "3", "--alpha-ms", "20", "--reattach-grace", "0"]
    async with Cluster(tmp_path, 2, flags=flags, num_blocks=24) as cluster:
        gateway = await cluster.gateway()
        answers = [await gateway.submit([n] * (5 + n), 12) for n in range(8)]
        await gateway.submit([1], 400)  # can never fit
        doomed = await gateway.submit([3], 60, request_id="doomed")
        await until(lambda: len(doomed.ids) > 3)
        await gateway.cancel("doomed")
        await cluster.rig.kill(1)
        await cluster.rig.start(1)
        for n, answer in enumerate(answers):
            assert (await answer.done()).ids == oracle([n] * (5 + n), 12)
        await doomed.done()
        assert await cluster.schedulers[0].end() == 0
    result = replay(journal, check=True)
    assert result.divergence is None
    snapshot = result.core.snapshot()
    assert (snapshot.jobs, snapshot.epoch, snapshot.rejected, snapshot.finished) == (0, 1, 1, 9)
    assert snapshot.preemptions_slots + snapshot.preemptions_blocks > 0
    if os.environ.get("FASTSERVE_RECORD_JOURNALS"):
        shutil.copy(journal, JOURNALS / "stage-loss-abort-preemption.jsonl")


async def test_a_live_run_keeps_its_end_when_the_files_are_full(tmp_path: Path) -> None:
    journal = tmp_path / "live.jsonl"
    limits = ["--journal-file-size", "4096", "--journal-files", "2"]
    async with Cluster(tmp_path, 1, flags=["--journal", str(journal), "--max-num-seqs", "3", *limits]) as cluster:
        gateway = await cluster.gateway()
        for answer in [await gateway.submit([n] * 5, 60) for n in range(16)]:
            await answer.done()
        assert await cluster.schedulers[0].end() == 0
    assert [number > 0 for number, _ in segments(journal)] == [True, True]
    result = replay(journal, check=True)
    assert (result.divergence, result.core.snapshot().finished) == (None, 16)
    assert result.since_ns is not None
