"""A whole system whose processes know each other by certificates; whoever has none gets no answer.

Operators visit it with one, and callers see the gateway's.
"""

import asyncio
import json
import ssl
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from tests.common.certificates import Authority, flags

from fastserve import Client
from fastserve.cli.main import main
from fastserve.v1 import kvstore_pb2, kvstore_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc, stage_pb2_grpc
from fastserve_common.state import SqliteState
from fastserve_common.tls import adopt
from fastserve_worker.fake_stage import fake_answer

from .system import PATIENCE_S, System

pytestmark = pytest.mark.cluster

Start = Callable[..., System]
PROMPT = [40, 41, 42]


@pytest.fixture(autouse=True)
def in_the_clear() -> Iterator[None]:
    """Commands that ran here leave no identity behind."""
    yield
    adopt(None)


def served(url: str, context: ssl.SSLContext) -> str:
    with urllib.request.urlopen(url, timeout=PATIENCE_S, context=context) as models:
        return str(json.load(models)["data"][0]["id"])


async def addresses(system: System) -> dict[str, str]:
    """Of every internal server."""
    (run_dir,) = system.folder.glob("fastserve-*")
    store = SqliteState(run_dir / "state.db")
    try:
        return {
            f"{role}-{name}": facts["address"]
            for role in ("scheduler", "stage", "kvstore")
            for name, facts in (await store.members(role)).items()
        }
    finally:
        await store.close()


async def test_everything_works_among_friends_and_nothing_for_strangers(start: Start, tmp_path: Path) -> None:
    me = Authority.make(tmp_path / "ca").sign("everybody")
    system = start(*flags(me))
    system.wait_ready()
    with system.client() as client:
        answer = client.generate(PROMPT, max_tokens=8, temperature=0, ignore_eos=True)
    assert list(answer.answers[0].token_ids) == fake_answer(PROMPT, 8)

    internal = await addresses(system)
    assert len(internal) == 4, internal
    only_trust = grpc.ssl_channel_credentials(me.authority.read_bytes())
    options = (("grpc.ssl_target_name_override", me.name),)
    for address in internal.values():
        for channel in (
            grpc.insecure_channel(address),
            grpc.secure_channel(address, only_trust, options=options),
        ):
            with channel, pytest.raises(grpc.RpcError) as error:
                scheduler_pb2_grpc.SchedulerStub(channel).GetState(scheduler_pb2.GetStateRequest(), timeout=30)
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE, (internal, address)

    scheduler = next(address for name, address in internal.items() if name.startswith("scheduler"))
    kvstore = next(address for name, address in internal.items() if name.startswith("kvstore"))
    stage = next(address for name, address in internal.items() if name.startswith("stage"))
    with grpc.secure_channel(scheduler, me.channel_credentials(), options=options) as channel:
        state = scheduler_pb2_grpc.SchedulerStub(channel).GetState(scheduler_pb2.GetStateRequest(), timeout=30)
        assert [stage.up for stage in state.stages] == [True, True]
        assert state.host_blocks_total > 0, "scheduler and stages reach the kvstore"
    with grpc.secure_channel(kvstore, me.channel_credentials(), options=options) as channel:
        kvstore_pb2_grpc.KvStoreStub(channel).GetStatus(kvstore_pb2.GetStatusRequest(), timeout=30)
    with grpc.secure_channel(stage, me.channel_credentials(), options=options) as channel:
        assert stage_pb2_grpc.StageStub(channel) is not None
        grpc.channel_ready_future(channel).result(timeout=30)
    assert system.stop() == 0
    system.assert_nothing_left()


async def test_operators_and_callers_come_in_by_certificates(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    authority = Authority.make(tmp_path / "ca")
    me, public = authority.sign("everybody"), authority.sign("gateway", "DNS:localhost,IP:127.0.0.1")
    system = start(*flags(me), f"--ssl-certfile={public.certificate}", f"--ssl-keyfile={public.key}")
    system.wait_ready()
    assert f"https://{system.http}/v1" in system.said

    (run_dir,) = system.folder.glob("fastserve-*")
    where = [f"--run-dir={run_dir}"]
    for command in (["ctl", *where, *flags(me), "get"], ["top", *where, *flags(me), "--once"]):
        assert await asyncio.to_thread(main, command) == 0, capsys.readouterr().err
        assert "predicted" in capsys.readouterr().out
    for command in (["ctl", *where, "get"], ["top", *where, "--once"]):
        assert await asyncio.to_thread(main, command) == 1, "without a certificate"
        assert capsys.readouterr().err

    context = ssl.create_default_context(cafile=str(authority.certificate))
    assert await asyncio.to_thread(served, f"https://{system.http}/v1/models", context) == "words"
    trust = grpc.ssl_channel_credentials(authority.certificate.read_bytes())
    with Client(system.grpc, tls=trust, timeout_s=PATIENCE_S) as client:
        answer = client.generate(PROMPT, max_tokens=8, temperature=0, ignore_eos=True)
    assert list(answer.answers[0].token_ids) == fake_answer(PROMPT, 8)
    asked = ["generate", "w40 w41", "--address", system.grpc, "--tls-ca", str(authority.certificate), "--max-tokens=4"]
    assert await asyncio.to_thread(main, asked) == 0, capsys.readouterr().err
    assert capsys.readouterr().out.strip()
    assert system.stop() == 0
    system.assert_nothing_left()
