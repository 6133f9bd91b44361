"""The built-in page: its files, and the state behind it. tests/cluster/test_page.py looks at it with a browser."""

import asyncio
import re
from pathlib import Path

from fastserve.v1 import scheduler_pb2 as pb

from .fake_scheduler import Script
from .rig import MODEL, rig, until

STATE = pb.GetStateResponse(
    policy="skip-join-mlfq",
    levels=[
        pb.LevelState(level=0, quantum_ns=12_500_000, waiting=3, running=1),
        pb.LevelState(level=1, quantum_ns=25_000_000),
    ],
    running=1,
    waiting=3,
    swapped=2,
    device_blocks_total=100,
    device_blocks_free=20,
    host_blocks_total=50,
    host_blocks_free=45,
    batches_in_flight=2,
    stages=[pb.StageState(stage=0, up=True, address="a:1", last_iteration_ns=2_500_000)],
    iterations=7,
    tokens_generated=99,
    swaps_out=4,
    swap_bytes_out=4096,
    swaps_in_flight=1,
)


async def test_the_page_is_whole_and_asks_for_nothing_from_elsewhere(tmp_path: Path) -> None:
    async with rig(tmp_path, api_key=("a-key",)) as r:
        page = await r.http.get("/")
        assert page.status_code == 200, "open without a key"
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        seen, texts = {"/"}, [page.text]
        waiting = re.findall(r'(?:src|href)="(/dashboard/[^"]+)"', page.text)
        while waiting:
            path = waiting.pop()
            if path in seen:
                continue
            seen.add(path)
            answer = await r.http.get(path)
            assert answer.status_code == 200, path
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            texts.append(answer.text)
            waiting += [f"/dashboard/{name}" for name in re.findall(r'from "\./([^"]+)"', answer.text)]
        assert len(seen) == 8
        for text in texts:
            assert set(re.findall(r"https?://[^\s\"']+", text)) <= {"http://www.w3.org/2000/svg"}
            assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|\beval\b|\sstyle=|\son\w+=", text)


async def test_a_file_that_has_not_changed_is_not_sent_again(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        etag = (await r.http.get("/")).headers["etag"]
        again = await r.http.get("/", headers={"if-none-match": etag})
        assert (again.status_code, again.content) == (304, b"")


async def test_without_the_page_there_is_nothing(tmp_path: Path) -> None:
    async with rig(tmp_path, dashboard=False) as r:
        for path in ("/", "/dashboard/page.js", "/dashboard/state"):
            assert (await r.http.get(path)).status_code == 404


async def test_the_state_wants_a_key_where_there_is_one(tmp_path: Path) -> None:
    async with rig(tmp_path, api_key=("a-key",)) as r:
        assert (await r.http.get("/dashboard/state")).status_code == 401
        assert (await r.http.get("/dashboard/state", headers={"authorization": "Bearer a-key"})).status_code == 200


async def test_the_state_is_what_scheduler_and_gateway_say(tmp_path: Path) -> None:
    async with rig(tmp_path, Script(ids=list(b"hello"))) as r:
        r.fake.state = STATE
        for _ in range(3):
            assert (await r.complete(max_tokens=5)).status_code == 200
        state = (await r.http.get("/dashboard/state")).json()
        assert state["model"] == MODEL
        assert state["scheduler"]["connected"]
        assert state["scheduler"]["ready"]
        assert state["gateway"]["accepted"] == sum(state["gateway"]["outcomes"].values()) == 3
        assert state["gateway"]["outcomes"]["length"] == 3
        assert state["gateway"]["generation_tokens"] == 15
        pipeline = state["pipeline"]
        assert pipeline["levels"][0] == {"level": 0, "quantum_ms": 12.5, "waiting": 3, "running": 1}
        assert pipeline["device_blocks"] == {"total": 100, "free": 20}
        assert pipeline["swaps"] == {"in_flight": 1, "out": 4, "out_bytes": 4096, "into": 0, "into_bytes": 0}
        assert pipeline["stages"] == [{"stage": 0, "up": True, "address": "a:1", "last_iteration_ms": 2.5}]
        for buckets in state["latency"].values():
            assert len(buckets["counts"]) == len(buckets["bounds"]) + 1
            assert buckets["counts"] == sorted(buckets["counts"])
        assert state["latency"]["time_to_first_token"]["counts"][-1] == 3
        assert state["latency"]["inter_token"]["counts"][-1] == 12


async def test_many_viewers_ask_the_scheduler_once(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        gate = r.fake.state_gate = asyncio.Event()
        viewers = [asyncio.create_task(r.http.get("/dashboard/state")) for _ in range(50)]
        await until(lambda: r.fake.states_asked == 1)
        gate.set()
        answers = await asyncio.gather(*viewers)
        assert r.fake.states_asked == 1
        assert len({answer.content for answer in answers}) == 1


async def test_a_scheduler_that_is_away_is_said_to_be(tmp_path: Path) -> None:
    async with rig(tmp_path, reconnect_timeout=0.2) as r:
        await r.fake.stop()
        await until(lambda: not r.gateway.engine.view.connected)
        state = (await r.http.get("/dashboard/state")).json()
        assert state["pipeline"] is None
        assert not state["scheduler"]["connected"]
        assert state["scheduler"]["detail"]
