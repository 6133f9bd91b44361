"""Requests through a live scheduler: every token equals that of an oracle that knows nothing of scheduling."""

import asyncio
import random
from pathlib import Path

import pytest

from fastserve.v1 import sampling_pb2, scheduler_pb2

from .rig import Answer, Cluster, TestGateway, until
from .stages import VOCAB_SIZE, oracle

TINY_QUEUES = ("--alpha-ms", "50")


async def _submit_many(gateway: TestGateway, rng: random.Random, count: int) -> list[tuple[list[int], int, Answer]]:
    requests = []
    for _ in range(count):
        prompt = [rng.randrange(900) for _ in range(rng.randrange(1, 60))]
        num_tokens = rng.randrange(1, 40)
        requests.append((prompt, num_tokens, await gateway.submit(prompt, num_tokens)))
        await asyncio.sleep(0)
    return requests


async def _all_right(requests: list[tuple[list[int], int, Answer]]) -> None:
    for prompt, num_tokens, answer in requests:
        await answer.done()
        assert answer.ids == oracle(prompt, num_tokens)
        assert answer.reason == "LENGTH"


@pytest.mark.parametrize("batches", [True, False])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
async def test_mixed_arrivals_get_the_oracles_tokens(tmp_path: Path, num_stages: int, batches: bool) -> None:
    async with Cluster(tmp_path, num_stages, flags=["--max-num-seqs", "4"]) as cluster:
        gateway = await cluster.gateway(batches=batches)
        await _all_right(await _submit_many(gateway, random.Random(num_stages), 24))


@pytest.mark.parametrize("num_stages", [1, 2])
async def test_preemption_by_slots_changes_no_token(tmp_path: Path, num_stages: int) -> None:
    async with Cluster(tmp_path, num_stages, flags=["--max-num-seqs", "2", *TINY_QUEUES]) as cluster:
        gateway = await cluster.gateway()
        await _all_right(await _submit_many(gateway, random.Random(7), 16))
        assert (await cluster.state()).preemptions > 0


@pytest.mark.parametrize("num_stages", [1, 2])
async def test_preemption_by_blocks_changes_no_token(tmp_path: Path, num_stages: int) -> None:
    """A pool of 26 blocks of 4 tokens holds one large request, or two."""
    flags = ["--max-num-seqs", "8", "--kv-policy", "recompute", *TINY_QUEUES]
    async with Cluster(tmp_path, num_stages, flags=flags, num_blocks=26) as cluster:
        gateway = await cluster.gateway()
        requests = await _submit_many(gateway, random.Random(3), 16)
        await _all_right(requests)
        assert any(answer.finished and answer.finished.preemptions for _, _, answer in requests)
        assert (await cluster.state()).preemptions > 0


async def test_chunked_prompts_get_the_oracles_tokens(tmp_path: Path) -> None:
    flags = ["--max-num-seqs", "3", "--max-num-batched-tokens", "16", "--prefill-chunk-tokens", "8"]
    async with Cluster(tmp_path, 2, flags=flags) as cluster:
        gateway = await cluster.gateway()
        await _all_right(await _submit_many(gateway, random.Random(5), 12))
        plans = cluster.rig.scripts[0].plans
        assert any(all(not item.sample for item in plan.items) for plan in plans), "a plan of inner chunks alone"


async def test_a_stop_id_ends_the_answer_and_is_part_of_it(tmp_path: Path) -> None:
    prompt = [5, 6, 7]
    expected = oracle(prompt, 10)
    async with Cluster(tmp_path) as cluster:
        gateway = await cluster.gateway()
        answer = await gateway.ask(prompt, 10, stop=[expected[4], VOCAB_SIZE + 5])
        assert answer.ids == expected[: expected.index(expected[4]) + 1]
        assert answer.reason == "STOP_TOKEN"
        assert answer.finished is not None
        assert answer.finished.stop_token_id == expected[4]


async def test_stop_ids_are_kept_away_below_min_tokens(tmp_path: Path) -> None:
    prompt = [9, 8, 7]
    stop = oracle(prompt, 3)[1:2]
    expected = oracle(prompt, 12, suppressed=stop, min_tokens=6)
    async with Cluster(tmp_path, 2) as cluster:
        gateway = await cluster.gateway()
        answer = await gateway.ask(prompt, 12, stop=stop, min_tokens=6)
        assert answer.ids == expected[: len(answer.ids)]
        assert len(answer.ids) > 6


async def test_seeds_penalties_and_logprobs_survive_preemption(tmp_path: Path) -> None:
    """The stage answers wrongly when the history it gets for a penalty is not the context."""
    flags = ["--max-num-seqs", "4", *TINY_QUEUES]
    async with Cluster(tmp_path, 2, flags=flags, num_blocks=24) as cluster:
        gateway = await cluster.gateway()
        asked = []
        for seed in range(8):
            sampling = sampling_pb2.SamplingParams(temperature=0.9, top_p=1, seed=seed, repetition_penalty=1)
            if seed % 2:
                sampling.presence_penalty = 0.5
            if seed % 3 == 0:
                sampling.logprobs = 2
            asked.append((seed, sampling, await gateway.submit([seed] * 20, 30, sampling=sampling)))
        for seed, sampling, answer in asked:
            await answer.done()
            assert answer.ids == oracle([seed] * 20, 30, seed=seed)
            if sampling.HasField("logprobs"):
                assert [entry.token_id for entry in answer.logprobs] == answer.ids
        assert (await cluster.state()).preemptions > 0


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "refusal"),
    [
        ([1] * 400, 200, "TOO_LONG"),
        ([1] * 100, 100, "TOO_LONG"),
        ([], 5, "INVALID"),
        ([1], 0, "INVALID"),
        ([VOCAB_SIZE], 5, "INVALID"),
    ],
    ids=["model", "pool", "no prompt", "no tokens", "vocabulary"],
)
async def test_what_can_never_run_is_refused_at_once(
    tmp_path: Path, prompt: list[int], max_tokens: int, refusal: str
) -> None:
    async with Cluster(tmp_path, num_blocks=30) as cluster:
        gateway = await cluster.gateway()
        assert gateway.hellos[-1].max_request_tokens == 120
        answer = await gateway.ask(prompt, max_tokens)
        assert answer.refusal == refusal
        assert answer.rejected is not None
        assert answer.rejected.message
        assert answer.rejected.retry_after_ms == 0
        assert (await gateway.ask([1] * 60, 60)).reason == "LENGTH", "exactly what the pool holds"


@pytest.mark.parametrize(
    ("flags", "refusal"),
    [
        (["--max-num-queued-reqs", "2"], "QUEUE_FULL_REQUESTS"),
        (["--max-num-queued-tokens", "512"], "QUEUE_FULL_TOKENS"),
    ],
)
async def test_a_full_queue_refuses_with_a_hint_and_opens_again(tmp_path: Path, flags: list[str], refusal: str) -> None:
    async with Cluster(tmp_path, flags=["--max-num-seqs", "1", *flags]) as cluster:
        gateway = await cluster.gateway()
        for _ in range(3):
            cluster.rig.scripts[0].gate.clear()
            answers = [await gateway.submit([n] * 250, 3) for n in range(6)]
            refused = [answers[i] for i in (3, 4, 5)]
            await asyncio.gather(*(answer.done() for answer in refused))
            cluster.rig.scripts[0].gate.set()
            for answer in refused:
                assert answer.refusal == refusal
                assert answer.rejected is not None
                assert answer.rejected.retry_after_ms > 0
            for n, answer in enumerate(answers[:3]):
                await answer.done()
                assert answer.ids == oracle([n] * 250, 3)


async def test_a_live_id_of_the_same_stream_or_of_another_gateway_is_refused(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        one, two = await cluster.gateway("one"), await cluster.gateway("two")
        cluster.rig.scripts[0].gate.clear()
        first = await one.submit([1, 2], 4, request_id="same")
        await until(lambda: len(cluster.rig.scripts[0].plans) == 1)
        assert (await two.ask([1, 2], 4, request_id="same")).refusal == "DUPLICATE_ID"
        again = await one.submit([1, 2], 4, request_id="same")
        assert (await again.done()).refusal == "DUPLICATE_ID"
        one.answers["same"] = first
        cluster.rig.scripts[0].gate.set()
        assert (await first.done()).ids == oracle([1, 2], 4)


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        (scheduler_pb2.CANCEL_REASON_CLIENT, "CANCELLED"),
        (scheduler_pb2.CANCEL_REASON_STOP_STRING, "STOP_STRING"),
        (scheduler_pb2.CANCEL_REASON_UNSPECIFIED, "CANCELLED"),
    ],
)
async def test_why_a_request_was_cancelled_is_what_its_end_says(
    tmp_path: Path, reason: scheduler_pb2.CancelReason.ValueType, outcome: str
) -> None:
    async with Cluster(tmp_path) as cluster:
        gateway = await cluster.gateway()
        answer = await gateway.submit([4, 5], 400, request_id="long")
        await until(lambda: len(answer.ids) >= 5)
        await gateway.cancel("long", reason)
        assert (await answer.done()).reason == outcome
        assert answer.ids == oracle([4, 5], len(answer.ids))


async def test_state_shows_the_cluster(tmp_path: Path) -> None:
    async with Cluster(tmp_path, 2) as cluster:
        gateway = await cluster.gateway()
        await gateway.ask([1, 2, 3], 5)
        state = await cluster.state()
        assert state.policy == "predicted"
        assert [stage.up for stage in state.stages] == [True, True]
        assert [stage.last_iteration_ns for stage in state.stages] == [1_000_000, 1_000_000]
        assert state.device_blocks_total == 256
        assert state.iterations == state.tokens_generated == 5
        assert [level.quantum_ns for level in state.levels] == sorted(level.quantum_ns for level in state.levels)
