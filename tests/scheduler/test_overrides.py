"""What operators change outlives the scheduler that they told: over takeovers, restarts, and a store that was away."""

import json
import logging
import sqlite3
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from fastserve.cli import ctl
from fastserve.cli.top import Source
from fastserve_common.settings import SettingsError
from fastserve_common.state import SqliteState, StateError, StateStore, open_state
from fastserve_scheduler import overrides
from fastserve_scheduler.overrides import NOTE, Entries, Override, Overrides
from fastserve_scheduler.settings import SchedulerSettings

from .rig import Cluster, SchedulerProcess, until, until_async
from .stages import oracle

PROMPT = [31, 32, 33]
UNSAVED = "# applied, not saved: another scheduler would not know of it as yet (the state store does not answer: away)"


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overrides, "LOOK_S", 0.02)


@dataclass
class Outage:
    """Of the part of the store that keeps what operators change."""

    reads: bool = False
    writes: bool = False


@pytest.fixture
def outage(monkeypatch: pytest.MonkeyPatch) -> Outage:
    now = Outage()
    save, saved = SqliteState.save, SqliteState.saved

    async def may_save(self: SqliteState, name: str, value: str, version: int) -> bool:
        if now.writes:
            raise StateError("away")
        return await save(self, name, value, version)

    async def may_read(self: SqliteState, name: str) -> str | None:
        if now.reads:
            raise StateError("away")
        return await saved(self, name)

    monkeypatch.setattr(SqliteState, "save", may_save)
    monkeypatch.setattr(SqliteState, "saved", may_read)
    return now


async def say(cluster: Cluster, *words: str) -> list[str]:
    """What `fastserve ctl WORDS` prints."""
    args = ctl._parser().parse_args(["--scheduler", cluster.address, "--reason", "INC-7", *words])
    return await ctl._call(Source(cluster.address, None), args.command(args))


async def next_scheduler(cluster: Cluster, *flags: str) -> None:
    """The one that leads ends, another one is started."""
    await cluster.schedulers[-1].end()
    await cluster.start_scheduler(*flags)


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
async def test_changes_outlive_a_takeover_until_they_are_reset(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    state = str(request.getfixturevalue("redis_url")) if kind == "redis" else ""
    async with Cluster(tmp_path, 2, state=state) as cluster:
        await cluster.gateway()
        standby = SchedulerProcess(cluster.settings())
        cluster.schedulers.append(standby)
        assert UNSAVED not in await say(cluster, "set", "policy=fcfs", "alpha_ms=2500", "max_num_seqs=3")
        await cluster.schedulers[0].crash()
        await cluster.find_scheduler(standby)
        gateway = await cluster.gateway()
        assert gateway.hellos[-1].policy == "fcfs"
        got = await say(cluster, "get")
        assert {"policy=fcfs", "alpha_ms=2500", "max_num_seqs=3"} <= set(got)
        told = [line for line in got if "was changed" in line]
        assert [line.split()[1] for line in told] == ["alpha_ms", "max_num_seqs", "policy"]
        assert told[0].endswith(": INC-7 (started with 10000)")
        assert got[-1] == "# accepting requests, as another scheduler was told"
        assert (await gateway.ask(PROMPT, 20)).ids == oracle(PROMPT, 20)

        assert "policy=predicted" in await say(cluster, "reset", "policy")
        assert "alpha_ms=2500" in await say(cluster, "get")
        assert "alpha_ms=10000" in await say(cluster, "reset")
        await next_scheduler(cluster)
        assert (await say(cluster, "get"))[-1] == "# accepting requests, as started"


async def test_a_change_counts_over_other_flags_of_the_next_start(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        await say(cluster, "set", "max_num_seqs=3", "eta=1")
        await next_scheduler(cluster, "--max-num-seqs", "5", "--eta", "2", "--num-queues", "4")
        assert {"max_num_seqs=3", "eta=1", "num_queues=4"} <= set(await say(cluster, "get"))
        assert {"max_num_seqs=5", "eta=2"} <= set(await say(cluster, "reset"))
        for wrong in ("alpha", "num_stages"):
            with pytest.raises(SettingsError, match="reset: expected some of policy"):
                await say(cluster, "reset", wrong)


async def test_a_change_holds_while_the_store_is_away_and_is_saved_when_it_is_back(
    tmp_path: Path, outage: Outage
) -> None:
    async with Cluster(tmp_path) as cluster:
        await cluster.gateway()
        outage.writes = True
        assert (await say(cluster, "set", "max_num_seqs=3"))[-1] == UNSAVED
        got = await say(cluster, "get")
        assert "max_num_seqs=3" in got
        assert got[-2] == UNSAVED
        outage.writes = False

        async def is_saved() -> bool:
            return UNSAVED not in await say(cluster, "get")

        await until_async(is_saved)
        await next_scheduler(cluster)
        assert "max_num_seqs=3" in await say(cluster, "get")


async def test_what_was_wiped_is_written_again(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        await say(cluster, "set", "max_num_seqs=3")
        with sqlite3.connect(tmp_path / "state.db") as db:
            db.execute("DELETE FROM notes")

        async def is_back() -> bool:
            return "max_num_seqs" in (await cluster.store.saved(NOTE) or "")

        await until_async(is_back)


async def test_a_leader_that_could_not_read_what_was_changed_takes_it_over_late(
    tmp_path: Path, outage: Outage, caplog: pytest.LogCaptureFixture
) -> None:
    """And what it was told meanwhile counts over it."""
    async with Cluster(tmp_path) as cluster:
        await say(cluster, "set", "max_num_seqs=3", "alpha_ms=2500")
        outage.reads = True
        await next_scheduler(cluster)
        await cluster.gateway()
        assert "max_num_seqs=16" in await say(cluster, "get"), "nobody waits for a store"
        assert (await say(cluster, "set", "alpha_ms=700"))[-1] == UNSAVED
        with caplog.at_level(logging.INFO, "fastserve.audit"):
            outage.reads = False

            async def has_it() -> bool:
                return {"max_num_seqs=3", "alpha_ms=700"} <= set(await say(cluster, "get"))

            await until_async(has_it)
        (said,) = [record for record in caplog.records if "taken over" in record.message]
        assert said.__dict__["changes"] == {"alpha_ms": "10000.0 -> 700.0", "max_num_seqs": "16 -> 3"}
        await until(lambda: "700" in _stored(tmp_path))


def _stored(folder: Path) -> str:
    with sqlite3.connect(folder / "state.db") as db:
        return str(db.execute("SELECT value FROM notes").fetchone()[0])


async def test_changes_that_no_stage_can_serve_do_not_leave_operators_without_a_scheduler(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as after a change of the model."""
    async with Cluster(tmp_path) as cluster:
        await cluster.schedulers[-1].end()
        entry = Override(7, "somebody", "", 0)
        await cluster.store.save(NOTE, json.dumps({"max_num_queued_tokens": asdict(entry)}), 1)
        await cluster.start_scheduler()
        await until(lambda: "cannot be served by these stages, and is reset" in caplog.text)
        await until_async(lambda: _is_empty(cluster.store))
        cluster.address = ""
        await cluster.find_scheduler(cluster.schedulers[-1])
        gateway = await cluster.gateway()
        assert (await gateway.ask(PROMPT, 20)).ids == oracle(PROMPT, 20)


async def _is_empty(store: StateStore) -> bool:
    return await store.saved(NOTE) == ""


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[StateStore]:
    opened = open_state(f"sqlite://{tmp_path}/state.db")
    yield opened
    await opened.close()


def _book(store: StateStore, *flags: str, generation: int = 1) -> Overrides:
    return Overrides(store, generation, SchedulerSettings.load(["--state", "sqlite:///x", *flags], prog="test"))


def _nobody(entries: Entries) -> None:
    raise AssertionError(entries)


async def test_of_what_was_changed_only_what_no_longer_fits_is_dropped(
    store: StateStore, caplog: pytest.LogCaptureFixture
) -> None:
    first = _book(store)
    await first.load()
    first.entries = first.with_changes({"max_num_batched_tokens": 100, "prefill_chunk_tokens": 64, "eta": 2}, "me", "")
    await first.save()
    assert first.not_saved == ""
    after_upgrade = json.loads(str(await store.saved(NOTE)))
    after_upgrade |= {"max_num_batched_tokens": {**after_upgrade["eta"], "value": 32}, "gone": after_upgrade["eta"]}
    await store.save(NOTE, json.dumps(after_upgrade), 1)
    second = _book(store, generation=2)
    await second.load()
    assert sorted(second.entries) == ["eta", "max_num_batched_tokens"]
    assert second.settings.max_num_batched_tokens == 32
    assert "--prefill-chunk-tokens must not exceed" in caplog.text


@pytest.mark.parametrize("text", ["{", "[1]", '{"eta": 3}', '{"eta": {"value": 3}}'])
async def test_what_cannot_be_understood_is_dropped(
    text: str, store: StateStore, caplog: pytest.LogCaptureFixture
) -> None:
    await store.save(NOTE, text, 1)
    book = _book(store, generation=2)
    await book.load()
    assert book.entries == {}
    assert "cannot understand" in caplog.text
    await book.look(_nobody)
    assert await store.saved(NOTE) == ""


async def test_whoever_no_longer_leads_saves_nothing(store: StateStore) -> None:
    old, new = _book(store, generation=1), _book(store, generation=2)
    for book, value in ((old, 2), (new, 3)):
        await book.load()
        book.entries = book.with_changes({"eta": value}, "me", "")
    await new.save()
    await old.save()
    assert old.not_saved == "another scheduler leads"
    assert '"value": 3' in str(await store.saved(NOTE))
