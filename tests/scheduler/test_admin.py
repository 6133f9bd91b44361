"""Operators over real gRPC: settings change under streams, wrong ones are refused by name, requests are looked into."""

import logging
from pathlib import Path

import grpc
import pytest
from google.protobuf.field_mask_pb2 import FieldMask

from fastserve.cli import ctl
from fastserve.cli.top import Source
from fastserve.v1 import admin_pb2 as pb
from fastserve.v1 import admin_pb2_grpc
from fastserve_common.channels import open_channel
from fastserve_common.errors import UnavailableError
from fastserve_common.settings import SettingsError
from fastserve_scheduler.admin_service import AdminService
from fastserve_scheduler.journal_reader import replay

from .rig import Cluster, until, until_async
from .stages import oracle

PROMPT = [31, 32, 33]


async def update(cluster: Cluster, **changes: object) -> pb.UpdateConfigResponse:
    config = pb.SchedulingConfig(**changes)  # type: ignore[arg-type]  # fields by name
    request = pb.UpdateConfigRequest(config=config, update_mask=FieldMask(paths=list(changes)), reason="test")
    async with open_channel(cluster.address) as channel:
        return await admin_pb2_grpc.AdminStub(channel).UpdateConfig(request)


async def test_settings_change_under_streams_and_the_journal_replays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = tmp_path / "journal"
    async with Cluster(tmp_path, 2, flags=["--journal", str(journal)]) as cluster:
        gateway = await cluster.gateway()
        answers = [await gateway.submit([n, *PROMPT], 120) for n in range(20)]
        await until(lambda: all(answer.ids for answer in answers))
        with caplog.at_level(logging.INFO, "fastserve.audit"):
            await update(cluster, max_num_seqs=2, alpha_ms=50.0)
            await update(cluster, policy="fcfs")
            changed = await update(cluster, policy="skip-join-mlfq", quantum_ratio=4, max_num_seqs=8)
        assert (changed.revision, changed.config.max_num_seqs, changed.config.alpha_ms) == (3, 8, 50.0)
        said = [record for record in caplog.records if record.name == "fastserve.audit"]
        assert [record.__dict__["changes"] for record in said][1] == {"policy": "predicted -> fcfs"}
        assert all(record.__dict__["reason"] == "test" and record.__dict__["peer"] for record in said)
        for n, answer in enumerate(answers):
            assert (await answer.done()).ids == oracle([n, *PROMPT], 120)
        assert [hello.policy for hello in gateway.hellos][-2:] == ["fcfs", "skip-join-mlfq"]
        assert (await cluster.state()).policy == "skip-join-mlfq"
    result = replay(journal, check=True)
    assert result.divergence is None
    assert result.core.config.mlfq.ratio == 4


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"policy": "lottery"}, "--policy"),
        ({"alpha_ms": 0.0}, "--alpha-ms"),
        ({"quantum_ratio": 1}, "--quantum-ratio"),
        ({"max_num_seqs": 0}, "--max-num-seqs"),
        ({"max_num_queued_tokens": 7}, "--max-num-queued-tokens"),
        ({"prefill_chunk_tokens": 5000}, "--prefill-chunk-tokens"),
    ],
)
async def test_what_cannot_be_is_refused_whole_and_by_name(
    tmp_path: Path, changes: dict[str, object], named: str
) -> None:
    async with Cluster(tmp_path) as cluster:
        await cluster.gateway()
        with pytest.raises(grpc.aio.AioRpcError, match=named) as refused:
            await update(cluster, **{"eta": 3, **changes})
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        async with open_channel(cluster.address) as channel:
            now = await admin_pb2_grpc.AdminStub(channel).GetConfig(pb.GetConfigRequest())
        assert (now.config.eta, now.revision) == (1, 0)


async def test_a_mask_that_names_nothing_or_something_else_is_refused(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster, open_channel(cluster.address) as channel:
        stub = admin_pb2_grpc.AdminStub(channel)
        for paths, named in ([], "update_mask"), (["num_stages"], "num_stages"):
            with pytest.raises(grpc.aio.AioRpcError, match=named):
                await stub.UpdateConfig(pb.UpdateConfigRequest(update_mask=FieldMask(paths=paths)))
        with pytest.raises(grpc.aio.AioRpcError, match="job_id"):
            await stub.GetJobStory(pb.GetJobStoryRequest())


async def test_limits_change_before_there_is_a_pipeline(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        await cluster.schedulers[0].end()
        await cluster.rig.kill(0)
        await cluster.start_scheduler()
        gateway = await cluster.gateway(ready=False)
        await update(cluster, max_num_queued_reqs=1, max_num_seqs=3)
        held, refused = await gateway.submit(PROMPT, 5), await gateway.submit(PROMPT, 5)
        assert (await refused.done()).refusal == "QUEUE_FULL_REQUESTS"
        await cluster.rig.start(0)
        assert (await held.done()).ids == oracle(PROMPT, 5)


async def test_a_standby_refuses_operators() -> None:
    with pytest.raises(UnavailableError, match="stands by"):
        await AdminService()._order(lambda admin: admin.config())


async def say(cluster: Cluster, *words: str) -> list[str]:
    """What `fastserve ctl WORDS` prints."""
    args = ctl._parser().parse_args(["--scheduler", cluster.address, "--reason", "test", *words])
    return await ctl._call(Source(cluster.address, None), args.command(args))


async def test_the_command_shows_and_sets(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        await cluster.gateway()
        before = await say(cluster, "get")
        assert "policy=predicted" in before
        assert "alpha_ms=10000" in before
        assert before[-1] == "# accepting requests, as started"
        assert "alpha_ms=250" in await say(cluster, "set", "alpha-ms=250", "max_num_seqs=5")
        after = await say(cluster, "get")
        assert "max_num_seqs=5" in after
        assert "changed 1 times" in after[-1]
        for wrong in ("alpha=1", "alpha_ms", "max_num_seqs=-1", "max_num_seqs=many"):
            with pytest.raises(SettingsError, match="set: "):
                await say(cluster, "set", wrong)


async def test_a_drain_can_be_taken_back(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        gateway = await cluster.gateway()
        script = cluster.rig.scripts[0]
        script.gate.clear()
        running = await gateway.submit(PROMPT, 30)
        await until_async(cluster.has_accepted(1))
        assert await say(cluster, "drain") == ["draining, 1 requests in progress"]
        await until(lambda: not gateway.statuses[-1].ready)
        assert (await gateway.ask(PROMPT, 5)).refusal == "DRAINING"
        assert (await say(cluster, "get"))[-1].startswith("# draining")
        script.gate.set()
        assert (await running.done()).ids == oracle(PROMPT, 30)
        await say(cluster, "resume")
        await until(lambda: gateway.statuses[-1].ready)
        assert (await gateway.ask(PROMPT, 5)).ids == oracle(PROMPT, 5)


async def test_requests_are_listed_told_about_and_aborted(tmp_path: Path) -> None:
    async with Cluster(tmp_path, flags=["--max-num-seqs", "1"]) as cluster:
        gateway = await cluster.gateway()
        script = cluster.rig.scripts[0]
        script.gate.clear()
        first = await gateway.submit(PROMPT, 30, request_id="first")
        await until(lambda: bool(script.plans))
        second = await gateway.submit(PROMPT, 40, request_id="second")
        await until_async(cluster.has_accepted(2))
        listed = await say(cluster, "jobs")
        assert [line.split()[-1] for line in listed[1:3]] == ["first", "second"]
        assert [line.split()[1] for line in listed[1:3]] == ["running", "absent"]
        assert listed[-1] == "# 2 of 2"
        assert (await say(cluster, "jobs", "--limit", "1"))[-1] == "# 1 of 2"
        number = listed[2].split()[0]
        story = await say(cluster, "story", "second")
        assert story[0] == f"job {number}"
        assert "arrived, joined level" in story[1]
        assert await say(cluster, "abort", "second") == ["second is aborted"]
        assert (await second.done()).reason == "CANCELLED"
        assert "finished with output tokens" in (await say(cluster, "story", number))[-1]
        script.gate.set()
        await first.done()
        for words in (("abort", "second"), ("story", "nobody"), ("story", "999")):
            with pytest.raises(grpc.aio.AioRpcError) as missing:
                await say(cluster, *words)
            assert missing.value.code() is grpc.StatusCode.NOT_FOUND
