"""Stages shared by two ranks: the same answers, and every rank's share of a job's KV goes where the job goes."""

import asyncio
import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastserve_common.state import SqliteState
from fastserve_worker.engine import StageModel
from fastserve_worker.settings import WorkerSettings
from fastserve_worker.worker import EXIT_FAILED, run_worker

from .case import check
from .cases import all_cases
from .cluster import Plan, cluster, is_member, until
from .forms import FORMS
from .models import BLOCK_SIZE
from .oracle import Oracle
from .preempted import lost_kv_at
from .test_answers import ask_all
from .test_preemption import ONE_AT_A_TIME, SMALL_POOL, TURNS, check_positions, pairs, take_turns


@pytest.fixture(autouse=True)
def _loading_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a model is loaded, torch's defaults are those of its process; here two ranks are in one."""
    load, lock = StageModel.load, threading.Lock()

    def one_at_a_time(model_dir: Path, **options: Any) -> StageModel:  # noqa: ANN401 - as load() has them
        with lock:
            return load(model_dir, **options)

    monkeypatch.setattr(StageModel, "load", one_at_a_time)


@pytest.mark.full
@pytest.mark.parametrize("num_stages", [1, 2])
async def test_every_option(
    num_stages: int, tmp_path: Path, model_dir: Callable[[str], Path], oracle: Callable[[str], Oracle], profiles: Path
) -> None:
    cases = all_cases(oracle("llama"))
    plan = Plan("llama", num_stages, num_ranks=2)
    async with cluster(tmp_path, model_dir("llama"), profiles, plan) as served:
        for case in cases:
            check(case, await FORMS["gRPC"](served, case), oracle("llama").result(case), "gRPC, alone")
        await ask_all(served, oracle("llama"), cases, "HTTP stream")


@pytest.mark.parametrize("num_stages", [1, pytest.param(2, marks=pytest.mark.full)])
async def test_swapped_at_every_position(
    num_stages: int, tmp_path: Path, model_dir: Callable[[str], Path], oracle: Callable[[str], Oracle], profiles: Path
) -> None:
    journal = tmp_path / "journal"
    flags = (*TURNS, *ONE_AT_A_TIME, "--kv-policy", "proactive", "--journal", str(journal))
    plan = Plan("llama", num_stages, SMALL_POOL, SMALL_POOL * BLOCK_SIZE, 4 * SMALL_POOL, flags, num_ranks=2)
    every = pairs(oracle("llama"))
    async with cluster(tmp_path, model_dir("llama"), profiles, plan) as served:
        for cases in every:
            await take_turns(served, cases, "gRPC", oracle("llama"))
    check_positions(lost_kv_at(journal, "swap"), 2 * len(every))


@pytest.mark.parametrize("leaving", [0, 1])
async def test_a_stage_ends_with_any_of_its_ranks(
    leaving: int, tmp_path: Path, model_dir: Callable[[str], Path]
) -> None:
    """To be started anew as a whole: what is left can compute nothing."""
    url = f"sqlite://{tmp_path}/state.db"
    store, stops = SqliteState(tmp_path / "state.db"), [asyncio.Event(), asyncio.Event()]
    ranks = []
    for rank, stop in enumerate(stops):
        settings = WorkerSettings(
            state=url, model_dir=model_dir("llama"), tensor_parallel_size=2, tensor_parallel_rank=rank, threads=1
        )
        ranks.append(asyncio.create_task(run_worker(settings, stop)))
    await until(functools.partial(is_member, store, "stage", "stage-0"))
    await until(functools.partial(is_member, store, "rank", "stage-0-rank-1"))
    stops[leaving].set()
    assert await ranks[leaving] == 0
    assert await ranks[1 - leaving] == EXIT_FAILED
    assert not await store.members("stage")
    await store.close()
