"""The process around a stage: settings, sizes, registration, the order of leaving."""

import asyncio
import logging
from pathlib import Path

import pytest

from fastserve_common.settings import SettingsError
from fastserve_common.state import SqliteState, StateError
from fastserve_worker import worker
from fastserve_worker.fake_stage import fake_answer
from fastserve_worker.settings import WorkerSettings
from fastserve_worker.sizing import count_blocks
from fastserve_worker.worker import EXIT_SETTINGS, run_worker

from .rig import Pipeline


def fake_settings(folder: Path, **changes: object) -> WorkerSettings:
    return WorkerSettings.model_validate({"state": f"sqlite://{folder}/state.db", "fake": True, **changes})


async def _member(store: SqliteState, name: str) -> dict[str, str]:
    async with asyncio.timeout(20):
        while name not in (members := await store.members("stage")):  # noqa: ASYNC110 - the store tells nobody
            await asyncio.sleep(0.01)
    return members[name]


async def test_stages_register_serve_and_leave(tmp_path: Path) -> None:
    stop = asyncio.Event()
    runs = [
        asyncio.create_task(run_worker(fake_settings(tmp_path, stage=stage, num_stages=2), stop)) for stage in (0, 1)
    ]
    store = SqliteState(tmp_path / "state.db")
    facts = [await _member(store, f"stage-{stage}") for stage in (0, 1)]
    assert [fact["stage"] for fact in facts] == ["0", "1"]
    assert facts[0]["fingerprint"] == facts[1]["fingerprint"]
    assert facts[0]["incarnation"] != facts[1]["incarnation"]
    async with Pipeline([fact["address"] for fact in facts]) as pipeline:
        job = pipeline.job([40, 41, 42], 5)
        assert await pipeline.generate([job], 5) == [fake_answer([40, 41, 42], 5)]
    stop.set()
    assert await asyncio.gather(*runs) == [0, 0]
    assert await store.members("stage") == {}
    await store.close()


async def test_a_late_state_store_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    members, asked, away = SqliteState.members, asyncio.Event(), True

    async def late(store: SqliteState, role: str) -> dict[str, dict[str, str]]:
        asked.set()
        if away:
            raise StateError("away")
        return await members(store, role)

    monkeypatch.setattr(SqliteState, "members", late)
    monkeypatch.setattr(worker, "STATE_RETRY_S", 0.01)
    stop = asyncio.Event()
    run = asyncio.create_task(run_worker(fake_settings(tmp_path), stop))
    await asked.wait()
    away = False
    store = SqliteState(tmp_path / "state.db")
    assert (await _member(store, "stage-0"))["device"] == "fake"
    stop.set()
    assert await run == 0
    await store.close()


async def test_what_cannot_be_served_ends_with_a_sentence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        assert await run_worker(fake_settings(tmp_path, kv_memory="1MiB"), asyncio.Event()) == EXIT_SETTINGS
    assert "set --kv-memory to at least 4194304 (4MiB), or --max-model-len to at most 1024" in caplog.text


async def test_a_port_that_is_taken_ends_with_a_sentence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    taken = await asyncio.start_server(lambda _r, _w: None, "127.0.0.1", 0)
    port = taken.sockets[0].getsockname()[1]
    async with taken:
        assert await run_worker(fake_settings(tmp_path, listen=f"127.0.0.1:{port}"), asyncio.Event()) == EXIT_SETTINGS
    assert f"cannot listen on 127.0.0.1:{port}" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stage": 2, "num_stages": 2}, "--stage: 2 is not one of 2 stages"),
        ({"tensor_parallel_rank": 1}, "--tensor-parallel-rank: 1 is not one of 1 ranks"),
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size: a fake stage has no layers to share"),
        ({"fake": False}, "--model-dir: needed"),
        ({"listen": "localhost"}, "--listen: expected HOST:PORT"),
        ({"kv_memory": "lots"}, "expected a size"),
        ({"dtype": "int8"}, "--dtype"),
        ({"fake": False, "model_dir": "x", "block_size": 32}, "--block-size: the CPU kernels work on blocks of 16"),
    ],
)
def test_wrong_settings_are_named(changes: dict[str, object], message: str) -> None:
    flags = {"state": "sqlite:///x", "fake": True, **changes}
    args = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items() if not isinstance(value, bool)]
    args += ["--fake"] if flags["fake"] else []
    with pytest.raises(SettingsError, match=message):
        WorkerSettings.load(args, prog="worker")


@pytest.mark.parametrize(
    ("listen", "advertise", "address"),
    [
        ("127.0.0.1:0", "", "127.0.0.1:77"),
        ("0.0.0.0:9", "stage-0.cluster", "stage-0.cluster:77"),
        ("0.0.0.0:9", "10.0.0.1:80", "10.0.0.1:80"),
    ],
)
def test_the_address_that_others_are_told(tmp_path: Path, listen: str, advertise: str, address: str) -> None:
    assert fake_settings(tmp_path, listen=listen, advertise=advertise).address(77) == address


def test_an_address_on_every_interface_gets_a_name(tmp_path: Path) -> None:
    assert not fake_settings(tmp_path, listen="0.0.0.0:9").address(9).startswith("0.0.0.0")


@pytest.mark.parametrize(("kv_memory", "num_blocks"), [(400, 4), (499, 4), (500, 5)])
def test_blocks_are_counted_whole(kv_memory: int, num_blocks: int) -> None:
    assert count_blocks(kv_memory=kv_memory, block_bytes=100, block_size=16, max_model_len=64) == num_blocks


def test_a_pool_below_one_sequence_is_refused_with_the_number_to_set() -> None:
    with pytest.raises(SettingsError, match=r"holds 48 tokens.*at least 500 .*at most 48"):
        count_blocks(kv_memory=399, block_bytes=100, block_size=16, max_model_len=65)
    with pytest.raises(SettingsError, match=r"holds 0 tokens, .* at least 100 \(100 bytes\)$"):
        count_blocks(kv_memory=99, block_bytes=100, block_size=16, max_model_len=1)
