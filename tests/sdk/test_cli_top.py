"""`fastserve top`: the frame, and how the scheduler is found."""

import asyncio
import contextlib
import fcntl
import os
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from rich.console import Console, RenderableType
from tests.common.certificates import Authority, flags

from fastserve.cli import find, top_view
from fastserve.cli.main import main
from fastserve.cli.top_view import Sample, frame, frames, unreachable
from fastserve.v1 import scheduler_pb2 as pb
from fastserve.v1 import scheduler_pb2_grpc as rpc
from fastserve_common.settings import SettingsError
from fastserve_common.state import open_state
from fastserve_common.tls import adopt

STATE = pb.GetStateResponse(
    policy="skip-join-mlfq",
    levels=[
        pb.LevelState(level=0, quantum_ns=12_500_000, waiting=3, running=4),
        pb.LevelState(level=9, quantum_ns=6_400_000_000, waiting=5),
    ],
    running=4,
    waiting=8,
    swapped=2,
    device_blocks_total=100,
    device_blocks_free=20,
    host_blocks_total=50,
    host_blocks_free=50,
    batches_in_flight=2,
    stages=[
        pb.StageState(stage=0, up=True, address="a:1", last_iteration_ns=20_000_000),
        pb.StageState(stage=1, up=False, address="b:2"),
    ],
    iterations=1000,
    preemptions=7,
    promotions=1,
    demotions=11,
    longest_wait_ms=2500,
    tokens_generated=123_456,
)


def text(view: RenderableType) -> str:
    console = Console(width=140, record=True, file=open(os.devnull, "w"))  # noqa: SIM115 - closed below
    with console.file:
        console.print(view)
    return console.export_text()


def test_a_frame_shows_everything() -> None:
    shown = text(frame(Sample("s:1", 0.0, STATE), None))
    for part in (
        *("fastserve skip-join-mlfq at s:1", "1/2 stages up", "running 4", "waiting 8", "swapped out 2"),
        *("batches in flight 2", "longest wait 2.5 s", "12.50 ms", "6.40 s", "80 of 100 used", "0 of 50 used"),
        *("123,456", "preemptions", "20.00 ms", "down", "b:2", "- /s"),
    ):
        assert part in shown


def test_rates_are_per_second_between_two_looks() -> None:
    later = pb.GetStateResponse()
    later.CopyFrom(STATE)
    later.tokens_generated += 500
    now, before = Sample("s:1", 12.0, later), Sample("s:1", 10.0, STATE)
    assert top_view.rate("tokens_generated", now, before) == "250.0 /s"
    assert "250.0 /s" in text(frame(now, before))


def test_a_frame_shows_what_moves_between_device_and_host() -> None:
    state = pb.GetStateResponse()
    state.CopyFrom(STATE)
    state.host_blocks_free = 20
    state.swaps_out, state.swap_bytes_out = 1200, 3 << 30
    state.swaps_in, state.swap_bytes_in = 900, 5 << 20
    state.swaps_in_flight, state.swaps_in_flight_out, state.swap_blocked_ns = 7, 3, 4_500_000_000
    later = pb.GetStateResponse()
    later.CopyFrom(state)
    later.swaps_out, later.swap_bytes_out = 1230, (3 << 30) + (20 << 20)
    later.swap_blocked_ns += 500_000_000
    shown = text(frame(Sample("s:1", 12.0, later), Sample("s:1", 10.0, state)))
    rows = {cells[0]: cells[1:] for line in shown.splitlines() if len(cells := line.strip("│ ").split()) > 6}
    assert "30 of 50 used" in shown
    assert [cell for cell in rows["out"] if cell != "│"] == ["3", "1,230", "15.0", "3.0GiB", "10MiB/s"]
    assert [cell for cell in rows["in"] if cell != "│"] == ["4", "900", "0.0", "5MiB", "0", "bytes/s"]
    assert "blocked on swaps: 0.25 requests on average, 5.0 s in all" in shown


def test_without_an_earlier_look_or_a_host_there_are_no_rates_of_swaps() -> None:
    shown = text(frame(Sample("s:1", 0.0, STATE), None))
    assert "blocked on swaps: 0.0 s in all" in shown
    assert "no host memory to swap with" in text(frame(Sample("s:1", 0.0, pb.GetStateResponse()), None))


def test_an_empty_cluster_has_a_frame() -> None:
    shown = text(frame(Sample("s:1", 0.0, pb.GetStateResponse(policy="fcfs")), None))
    assert "0/0 stages up" in shown
    assert "0 of 0 used" in shown


def test_the_last_frame_stays_under_the_notice() -> None:
    shown = text(unreachable("gone", {"default": Sample("s:1", 0.0, STATE)}))
    assert "gone; trying again" in shown
    assert "80 of 100 used" in shown


def test_groups_are_shown_one_under_the_other_with_rates_of_their_own() -> None:
    earlier = pb.GetStateResponse()
    earlier.CopyFrom(STATE)
    earlier.tokens_generated -= 500
    before = {"a": Sample("s:1", 0.0, earlier), "b": Sample("s:2", 0.0, earlier)}
    now = {"a": Sample("s:1", 2.0, STATE), "b": Sample("s:3", 2.0, STATE), "c": Sample("s:4", 2.0, STATE)}
    shown = text(frames(now, before))
    a, b, c = shown[shown.index("group a") :].split("group ")[1:]
    assert "250.0 /s" in a
    assert "250.0 /s" not in b, "another scheduler leads: it counts from zero"
    assert "at s:4" in c
    assert "group" not in text(frames({"a": before["a"]}, {}))


@pytest.mark.parametrize(("used", "total", "full"), [(0, 0, 0), (0, 9, 0), (1, 1000, 1), (5, 10, 20), (10, 10, 40)])
def test_bars(used: int, total: int, full: int) -> None:
    assert top_view.bar(used, total).plain.count("█") == full


class FakeScheduler(rpc.SchedulerServicer):
    def Connect(
        self, request_iterator: Iterator[pb.GatewayMessage] | AsyncIterator[pb.GatewayMessage], context: object
    ) -> Iterator[pb.SchedulerMessage]:
        raise AssertionError("top does not connect")

    def GetState(self, request: pb.GetStateRequest, context: object) -> pb.GetStateResponse:
        return STATE


@contextlib.contextmanager
def serving(credentials: grpc.ServerCredentials | None = None) -> Iterator[str]:
    with ThreadPoolExecutor(max_workers=2) as pool:
        server = grpc.server(pool)
        rpc.add_SchedulerServicer_to_server(FakeScheduler(), server)
        where = "localhost:0"
        port = server.add_secure_port(where, credentials) if credentials else server.add_insecure_port(where)
        server.start()
        yield f"localhost:{port}"
        server.stop(grace=None).wait()


@pytest.fixture
def scheduler() -> Iterator[str]:
    with serving() as address:
        yield address


def test_certificates_come_from_flags_or_from_the_services_variables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority.make(tmp_path)
    server, me = authority.sign("server", "DNS:a.cluster"), authority.sign("me")
    named = "--tls-name=a.cluster"
    try:
        with serving(server.server_credentials()) as address:
            once = ["top", "--once", "--scheduler", address]
            assert main([*once, *flags(me), named]) == 0
            assert "skip-join-mlfq" in capsys.readouterr().out
            assert main([*once, *flags(me)]) == 1, "the certificate has another name"
            assert main(once) == 1
            for name, path in (("CERT", me.certificate), ("KEY", me.key), ("CA", me.authority)):
                monkeypatch.setenv(f"FASTSERVE_TLS_{name}", str(path))
            assert main([*once, named]) == 0
    finally:
        adopt(None)


def register(state_url: str, address: str, name: str = "leader") -> None:
    async def put() -> None:
        store = open_state(state_url)
        await store.register("scheduler", name, {"address": address, "incarnation": "1"}, ttl_s=60)
        await store.close()

    asyncio.run(put())


def test_once_prints_one_frame(scheduler: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    register(f"sqlite://{tmp_path}/state.db", scheduler)
    for where in (
        ["--scheduler", scheduler],
        ["--state", f"sqlite://{tmp_path}/state.db"],
        ["--run-dir", str(tmp_path)],
    ):
        assert main(["top", "--once", *where]) == 0
        assert "skip-join-mlfq" in capsys.readouterr().out


def test_of_several_groups_one_may_be_chosen(
    scheduler: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--state", f"sqlite://{tmp_path}/state.db"]
    register(where[1], scheduler)
    register(where[1], scheduler, "leader@b")
    assert main(["top", "--once", *where]) == 0
    assert "group default" in (shown := capsys.readouterr().out)
    assert "group b" in shown
    assert main(["top", "--once", *where, "--group", "b"]) == 0
    assert "group" not in capsys.readouterr().out
    assert main(["top", "--once", *where, "--group", "c"]) == 1
    assert "no scheduler of the group c is registered" in capsys.readouterr().err
    assert main(["ctl", *where, "get"]) == 1
    assert "there are several groups; choose one with --group: b, default" in capsys.readouterr().err


def test_what_is_missing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(open_state(f"sqlite://{tmp_path}/state.db").close())
    for where, status, said in (
        (["--scheduler", "localhost:1"], 1, "the scheduler at localhost:1 does not answer"),
        (["--state", f"sqlite://{tmp_path}/state.db"], 1, "no scheduler is registered"),
        (["--state", f"sqlite://{tmp_path}/absent.db"], 2, "--state: there is no"),
        (["--state", "mysql://x"], 2, "--state: expected sqlite:///path or redis"),
        (["--run-dir", str(tmp_path / "absent")], 2, "has no state.db"),
        (["--interval", "0"], 2, "--interval must be above 0"),
        (["--tls-ca", "ca.crt"], 2, "--tls-cert, --tls-key and --tls-ca must be given together"),
        (["--tls-ca=ca", "--tls-cert=a.crt", "--tls-key=a.key"], 2, "--tls-cert: cannot use a.crt"),
    ):
        assert main(["top", "--once", *where]) == status
        assert said in capsys.readouterr().err


def make_run_dir(parent: Path, name: str) -> int:
    """Returns the descriptor that holds its lock."""
    (parent / name).mkdir()
    (parent / name / "state.db").touch()
    fd = os.open(parent / name / "lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


def test_the_one_live_run_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    with pytest.raises(SettingsError, match="no `fastserve serve` found"):
        find.find_state(None, None)
    first = make_run_dir(tmp_path, "fastserve-a")
    second = make_run_dir(tmp_path, "fastserve-b")
    with pytest.raises(SettingsError, match=r"choose one with --run-dir: .*-a, .*-b"):
        find.find_state(None, None)
    os.close(second)  # that one has ended
    assert find.find_state(None, None) == f"sqlite://{tmp_path}/fastserve-a/state.db"
    os.close(first)
