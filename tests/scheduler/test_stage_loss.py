"""Stages that die, fault, stall, come back, or are not the ones they should be."""

import logging
from pathlib import Path
from typing import ClassVar

import pytest

from fastserve.v1 import stage_pb2
from fastserve_common.state import LEASE_TTL_S, SqliteState, StateError
from fastserve_scheduler import app, driver, pipeline
from fastserve_scheduler.driver import Driver

from .rig import Cluster, until, until_async
from .stages import oracle

PROMPT = [11, 12, 13, 14, 15]


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("at", [0, 1, 2, 7])
async def test_a_stage_that_dies_in_mid_stream_costs_no_token(tmp_path: Path, victim: int, at: int) -> None:
    """`at`: tokens that the first request has when the stage dies; 0: in its prefill."""
    async with Cluster(tmp_path, 2, flags=["--max-num-seqs", "3"]) as cluster:
        gateway = await cluster.gateway()
        if at == 0:
            cluster.rig.scripts[1].gate.clear()
        answers = [await gateway.submit([n, *PROMPT], 25) for n in range(5)]
        await until(lambda: bool(cluster.rig.scripts[0].plans) and len(answers[0].ids) >= at)
        await cluster.rig.kill(victim)
        await until(lambda: not gateway.statuses[-1].ready)
        assert f"stage {victim}" in gateway.statuses[-1].detail
        late = await gateway.submit([77, *PROMPT], 25)
        cluster.rig.scripts[1].gate.set()
        await cluster.rig.start(victim)
        for n, answer in [*enumerate(answers), (77, late)]:
            assert (await answer.done()).ids == oracle([n, *PROMPT], 25)
        assert gateway.statuses[-1].ready


async def test_both_stages_die_again_and_again(tmp_path: Path) -> None:
    async with Cluster(tmp_path, 2) as cluster:
        gateway = await cluster.gateway()
        answer = await gateway.submit(PROMPT, 60)
        for cycle in range(1, 5):
            await until(lambda cycle=cycle: len(answer.ids) >= 10 * cycle)  # type: ignore[misc]
            await cluster.rig.kill(cycle % 2)
            if cycle == 3:
                await cluster.rig.kill(1 - cycle % 2)
                await cluster.rig.start(1 - cycle % 2)
            await cluster.rig.start(cycle % 2)
        assert (await answer.done()).ids == oracle(PROMPT, 60)


@pytest.mark.parametrize("copies", [1, 3])
async def test_reports_of_another_epoch_or_seen_before_count_once(tmp_path: Path, copies: int) -> None:
    async with Cluster(tmp_path, 2) as cluster:
        for script in cluster.rig.scripts:
            script.copies, script.haunted = copies, True
        gateway = await cluster.gateway()
        answers = [await gateway.submit([n, *PROMPT], 40) for n in range(4)]
        await until(lambda: len(answers[0].ids) >= 5)
        await cluster.rig.kill(0)
        await cluster.rig.start(0)
        for n, answer in enumerate(answers):
            assert (await answer.done()).ids == oracle([n, *PROMPT], 40)


@pytest.mark.parametrize("place", ["stage 1", "stage 0", "returned"])
async def test_an_epoch_that_rises_with_a_plan_anywhere_counts_each_token_once(tmp_path: Path, place: str) -> None:
    """The epoch is raised at every one of the first output positions, with the plan on either stage or done."""
    tokens = 10
    async with Cluster(tmp_path, 2) as cluster:
        first, last = cluster.rig.scripts
        gateway = await cluster.gateway()
        for position in range(1, tokens):
            start = len(first.plans)
            gate = {"stage 0": first.gate, "stage 1": last.gate}.get(place)
            script = {"stage 0": first, "stage 1": last}.get(place)
            answer = await gateway.submit([position], tokens)
            await until(lambda answer=answer, position=position: len(answer.ids) >= position - 1)  # type: ignore[misc]
            if gate is not None:
                gate.clear()
            if script is not None:
                await until(lambda start=start: len(first.plans) > start)  # type: ignore[misc]
            rounds = len(gateway.statuses)
            await cluster.rig.kill(position % 2)
            await until(lambda rounds=rounds: len(gateway.statuses) > rounds)  # type: ignore[misc]
            if gate is not None:
                gate.set()
            await cluster.rig.start(position % 2)
            assert (await answer.done()).ids == oracle([position], tokens)


def _is_poison(plan: stage_pb2.IterationPlan) -> bool:
    return any(item.start == 0 and item.token_ids[:4] == b"\x63\x00\x00\x00" for item in plan.items)


@pytest.mark.parametrize("kind", ["fault", "crash"])
@pytest.mark.parametrize("stage", [0, 1])
async def test_a_request_that_breaks_stages_fails_alone(tmp_path: Path, kind: str, stage: int) -> None:
    async with Cluster(tmp_path, 2, flags=["--max-faults", "2"]) as cluster:
        script = cluster.rig.scripts[stage]
        gateway = await cluster.gateway()
        before = [await gateway.submit([n, *PROMPT], 60) for n in range(3)]
        await until(lambda: all(answer.ids for answer in before))
        if kind == "fault":
            script.fault = lambda plan: "out of memory" if _is_poison(plan) else None
        else:
            script.crash = _is_poison
        poison = await gateway.submit([99, 1, 2], 20)
        beside = await gateway.submit([50, *PROMPT], 30)
        assert (await poison.done()).reason == "ERROR"
        assert poison.ids == []
        for n, answer in enumerate(before):
            assert (await answer.done()).ids == oracle([n, *PROMPT], 60)
        assert (await beside.done()).ids == oracle([50, *PROMPT], 30)


async def test_a_request_that_breaks_stages_while_decoding_fails_alone(tmp_path: Path) -> None:
    """It gets past its prompt each time it is computed again: only the place where it breaks counts."""
    async with Cluster(tmp_path, 1, flags=["--max-faults", "3", "--max-num-batched-tokens", "8"]) as cluster:

        def fault(plan: stage_pb2.IterationPlan) -> str | None:
            bad = any(i.start + i.num_tokens > 20 and i.block_table and i.job_id == 1 for i in plan.items)
            return "bad position" if bad else None

        cluster.rig.scripts[0].fault = fault
        gateway = await cluster.gateway()
        poison = await gateway.submit([99] * 12, 40)
        beside = [await gateway.submit([n, *PROMPT], 40) for n in range(3)]
        assert (await poison.done()).reason == "ERROR"
        assert poison.ids == oracle([99] * 12, len(poison.ids))
        assert len(poison.ids) == 9
        for n, answer in enumerate(beside):
            assert (await answer.done()).ids == oracle([n, *PROMPT], 40)


async def test_a_fault_that_passes_costs_nobody_anything(tmp_path: Path) -> None:
    async with Cluster(tmp_path, 2) as cluster:
        gateway = await cluster.gateway()
        script = cluster.rig.scripts[1]
        faults = iter(["hiccup", None, "hiccup", "hiccup"])
        script.fault = lambda plan: next(faults, None)
        answers = [await gateway.submit([n, *PROMPT], 20) for n in range(4)]
        for n, answer in enumerate(answers):
            assert (await answer.done()).ids == oracle([n, *PROMPT], 20)
        assert next(faults, "spent") == "spent"


async def test_a_stage_that_stops_answering_is_given_up_and_replaced(tmp_path: Path) -> None:
    async with Cluster(tmp_path, 2, flags=["--stall-timeout", "0.3"]) as cluster:
        gateway = await cluster.gateway()
        answer = await gateway.submit(PROMPT, 30)
        await until(lambda: len(answer.ids) >= 3)
        cluster.rig.scripts[1].gate.clear()
        await until(lambda: any("stage 1" in s.detail and "no answer" in s.detail for s in gateway.statuses))
        cluster.rig.scripts[1].gate.set()
        assert (await answer.done()).ids == oracle(PROMPT, 30)


async def test_an_idle_pipeline_is_not_taken_for_a_stalled_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "PROGRESS_CHECK_S", 0.002)
    looks = 0
    check_progress = Driver._check_progress

    def counted(self: Driver) -> None:
        nonlocal looks
        looks += 1
        check_progress(self)

    monkeypatch.setattr(Driver, "_check_progress", counted)
    async with Cluster(tmp_path, flags=["--stall-timeout", "0.01"]) as cluster:
        gateway = await cluster.gateway()
        assert (await gateway.ask(PROMPT, 3)).reason == "LENGTH"
        known, idle_since = len(gateway.statuses), looks
        await until(lambda: looks > idle_since + 100)
        assert (await gateway.ask(PROMPT, 3)).reason == "LENGTH"
        assert len(gateway.statuses) == known


async def test_stages_of_different_models_are_not_joined(tmp_path: Path) -> None:
    async with Cluster(tmp_path, 2) as cluster:
        gateway = await cluster.gateway()
        await cluster.rig.kill(1)
        await cluster.rig.start(1, fingerprint="another")
        await until(lambda: "differ in fingerprint" in gateway.statuses[-1].detail)
        assert not gateway.statuses[-1].ready
        waiting = await gateway.submit(PROMPT, 4)
        await cluster.rig.kill(1)
        await cluster.rig.start(1)
        assert (await waiting.done()).ids == oracle(PROMPT, 4)


async def test_another_model_on_all_stages_needs_another_scheduler(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        gateway = await cluster.gateway()
        await cluster.rig.kill(0)
        await cluster.rig.start(0, fingerprint="another")
        await until(lambda: "another model" in gateway.statuses[-1].detail)
        assert not gateway.statuses[-1].ready
        await cluster.rig.kill(0)
        await cluster.rig.start(0)
        await until(lambda: gateway.statuses[-1].ready)


async def test_a_pool_that_comes_back_smaller_shortens_what_no_longer_fits(tmp_path: Path) -> None:
    async with Cluster(tmp_path, num_blocks=64) as cluster:
        gateway = await cluster.gateway()
        answer = await gateway.submit(PROMPT, 200)
        await until(lambda: len(answer.ids) >= 3)
        await cluster.rig.kill(0)
        await cluster.rig.start(0, num_blocks=16)
        await answer.done()
        assert answer.reason == "LENGTH"
        assert answer.ids == oracle(PROMPT, 64 - len(PROMPT))
        assert gateway.hellos[-1].max_request_tokens == 64


async def test_a_missing_stage_is_named(tmp_path: Path) -> None:
    async with Cluster(tmp_path, 3) as cluster:
        gateway = await cluster.gateway()
        await cluster.rig.kill(2)
        await until(lambda: "stage 2 of 3" in gateway.statuses[-1].detail)

        async def down() -> bool:
            return [stage.up for stage in (await cluster.state()).stages][2] is False

        await until_async(down)
        await cluster.rig.start(2)
        await until(lambda: gateway.statuses[-1].ready)


async def test_a_report_that_does_not_fit_its_plan_costs_the_stage_its_stream_and_no_token(tmp_path: Path) -> None:
    async with Cluster(tmp_path, 2) as cluster:
        gateway = await cluster.gateway()
        answer = await gateway.submit(PROMPT, 30)
        await until(lambda: len(answer.ids) >= 3)

        def once(report: stage_pb2.IterationReport) -> None:
            report.token_ids += bytes(4)
            script.mangle = lambda report: None

        script = cluster.rig.scripts[1]
        script.mangle = once
        assert (await answer.done()).ids == oracle(PROMPT, 30)
        assert any("does not fit" in status.detail for status in gateway.statuses)


async def test_a_stage_that_stops_renewing_its_membership_is_taken_for_frozen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "ABSENT_S", 0.05)
    async with Cluster(tmp_path, 2) as cluster:
        gateway = await cluster.gateway()
        answer = await gateway.submit(PROMPT, 20)
        cluster.rig.scripts[1].gate.clear()
        await cluster.store.unregister("stage", "stage-1")  # it renews some time later
        await until(lambda: any("stopped renewing" in status.detail for status in gateway.statuses))
        cluster.rig.scripts[1].gate.set()
        assert (await answer.done()).ids == oracle(PROMPT, 20)


async def test_a_stage_that_does_not_answer_configure_is_connected_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "CONFIGURE_TIMEOUT_S", 0.1)
    async with Cluster(tmp_path, 2) as cluster:
        gateway = await cluster.gateway()
        cluster.rig.scripts[0].answers = False
        await cluster.rig.kill(0)
        await cluster.rig.start(0)
        await until(
            lambda: "stage 0 of 2" in gateway.statuses[-1].detail and "Configure" in gateway.statuses[-1].detail
        )
        cluster.rig.scripts[0].answers = True
        assert (await gateway.ask(PROMPT, 5)).ids == oracle(PROMPT, 5)


class StoreThatGoesAway(SqliteState):
    away = False
    refused: ClassVar[set[str]] = set()

    async def members(self, role: str) -> dict[str, dict[str, str]]:
        self._check("members")
        return await super().members(role)

    async def acquire(self, name: str, owner: str, ttl_s: float = LEASE_TTL_S) -> bool:
        self._check("acquire")
        return await super().acquire(name, owner, ttl_s)

    def _check(self, call: str) -> None:
        if type(self).away:
            self.refused.add(call)
            raise StateError("away")


async def test_streams_go_on_without_the_state_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "open_state", lambda url: StoreThatGoesAway(tmp_path / "state.db"))
    async with Cluster(tmp_path, 2) as cluster:
        gateway = await cluster.gateway()
        known = len(gateway.statuses)
        StoreThatGoesAway.away = True
        try:
            await until(lambda: StoreThatGoesAway.refused == {"members", "acquire"})
            assert (await gateway.ask(PROMPT, 20)).ids == oracle(PROMPT, 20)
        finally:
            StoreThatGoesAway.away = False
        assert (await gateway.ask(PROMPT, 20)).ids == oracle(PROMPT, 20)
        assert len(gateway.statuses) == known, "nobody noticed"


async def test_an_orderly_end_warns_of_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        async with Cluster(tmp_path, 2) as cluster:
            assert (await (await cluster.gateway()).ask([1, 2], 3)).ids
    assert [record for record in caplog.records if "let go of a stage" in record.getMessage()]
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
