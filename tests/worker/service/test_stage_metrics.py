"""What a stage counts, against what it was made to do."""

import asyncio
import contextlib

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from tests.worker.swap.rig import IN, OUT, swapping_fakes

from fastserve_worker.fake_stage import FakeOptions, FakeStage, fake_answer
from fastserve_worker.metrics import StageMetrics
from fastserve_worker.service import serve_in_process

from .rig import Pipeline

PROMPT = list(range(100, 140))


def samples(metrics: StageMetrics) -> dict[str, float]:
    """By name and labels other than the stage."""
    found = {}
    for family in text_string_to_metric_families(generate_latest(metrics.registry).decode()):
        for sample in family.samples:
            rest = ",".join(value for key, value in sorted(sample.labels.items()) if key != "stage")
            found[f"{sample.name.removeprefix('fastserve:stage_')}{{{rest}}}"] = sample.value
    return found


async def test_iterations_are_counted_by_size_and_by_where_their_time_went() -> None:
    metrics = [StageMetrics(stage) for stage in range(2)]
    async with contextlib.AsyncExitStack() as stack:
        served = [
            await stack.enter_async_context(
                serve_in_process(FakeStage(stage=i, num_stages=2, options=FakeOptions(iteration_ns=1000)), metrics=m)
            )
            for i, m in enumerate(metrics)
        ]
        before = samples(metrics[0])
        assert before["iteration_seconds_count{}"] == before["epochs_total{}"] == before["busy_seconds{}"] == 0
        pipeline = await stack.enter_async_context(Pipeline([address for _, address in served]))
        jobs = [pipeline.job(PROMPT, 4), pipeline.job([7], 4)]
        assert await pipeline.generate(jobs, 4) == [fake_answer(PROMPT, 4), fake_answer([7], 4)]
        await pipeline.run([])
        now = [samples(m) for m in metrics]
    for stage, found in enumerate(now):
        assert found["iteration_seconds_count{}"] == 4, "a plan for swaps alone is no iteration"
        assert found["iteration_tokens_sum{}"] == 41 + 3 * 2
        assert found["iteration_batch_size_sum{}"] == 4 * 2
        assert found["tokens_total{prefill}"] == 41
        assert found["tokens_total{decode}"] == 3 * 2
        assert found["forward_seconds_total{compute}"] > 0
        assert (found["forward_seconds_total{send}"] > 0) == (stage == 0), "the last one has nobody to send to"
        assert found["kv_bytes{}"] == served[stage][0].info.num_blocks * served[stage][0].info.kv_block_bytes
        assert found["epochs_total{}"] == 1
        assert found["busy_seconds{}"] == found["host_attached{}"] == found["faults_total{}"] == 0
        assert found["process_resident_memory_bytes{}"] > 0


async def test_copies_are_counted_by_direction() -> None:
    async with swapping_fakes(1, num_host_slots=8) as (swapper, servers):
        metrics, stage = StageMetrics(0), servers[0].stage
        assert stage is not None
        metrics.watch(stage, lambda: 0.0)
        job = swapper.pipeline.job(PROMPT, 4)
        await swapper.run([job])
        slots = list(range(len(job.table)))
        await swapper.run([], swapper.op(OUT, job.job_id, job.table, slots))
        await swapper.run([], swapper.op(IN, job.job_id, job.table, slots[:1] * len(slots)))
        found = samples(metrics)
        num_bytes = len(slots) * stage.info.kv_block_bytes
        for direction in ("out", "in"):
            assert found[f"copies_total{{{direction}}}"] == 1
            assert found[f"copy_bytes_total{{{direction}}}"] == num_bytes
            assert found[f"copy_seconds_total{{{direction}}}"] > 0
            assert found[f"copies_in_flight{{{direction}}}"] == found[f"copies_failed_total{{{direction}}}"] == 0
        assert found["host_attached{}"] == 1


async def test_an_epoch_that_fails_is_counted_once() -> None:
    metrics = StageMetrics(0)
    async with serve_in_process(FakeStage(), metrics=metrics) as (_, address), Pipeline([address]) as pipeline:
        plan = pipeline.plan([])
        for _ in range(3):
            await pipeline.first.send_plan(plan)  # the second one comes a second time
        async with asyncio.timeout(20):
            while samples(metrics)["faults_total{}"] != 1:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.005)
