"""Preempted before every single token, by whichever means: the same answers, to the last log-probability."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastserve_scheduler.core import waste

from .case import Case, check
from .cluster import Cluster, Plan, cluster
from .forms import FORMS
from .models import BLOCK_SIZE
from .oracle import Oracle
from .preempted import lost_kv_at, lost_turn_at

#: Two requests that take turns; their prompts alone fill more than half of the small pool.
PROMPTS = (
    "Whoever stands in a queue has time to think about queues, and so on.",
    "A second voice, which is about as long as the first, and interrupts.",
)
NUM_TOKENS = 54
SMALL_POOL = 8
ONE_AT_A_TIME = ("--max-num-seqs", "1", "--max-num-batched-tokens", "160")
#: A job that has waited at all is starving, and goes to the top, where a token uses its quantum up: so jobs of one
#: batch take turns, and the one whose turn it is takes the blocks of the other.
TURNS = ("--policy", "skip-join-mlfq", "--alpha-ms", "0.001", "--promotion", "reset", "--demote-when", "used-reaches")

#: How a victim gives its blocks up: policies that move KV to the host, and the one that computes it again.
SWAPPING = ("reactive", "proactive")
MEANS = ("recompute", *SWAPPING)
FULL = pytest.mark.full
MATRIX = [
    ("recompute", 2),
    ("proactive", 2),
    pytest.param("recompute", 1, marks=FULL),
    pytest.param("recompute", 3, marks=FULL),
    *(pytest.param("reactive", stages, marks=FULL) for stages in (1, 2, 3)),
    *(pytest.param("proactive", stages, marks=FULL) for stages in (1, 3)),
]


@pytest.fixture(autouse=True)
def never_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that throw each other out at every token are what the scheduler keeps from happening, and what is wanted."""
    monkeypatch.setattr(waste, "LIMIT", 1 << 30)


def pairs(oracle: Oracle) -> list[list[Case]]:
    """Who takes turns with whom."""
    seeded = {"temperature": 0.9, "top_p": 0.95, "seed": 7, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    penalised = {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3}
    every: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
        ({"temperature": 0, "logprobs": 2}, {}),
        (penalised, {"temperature": 0}),
        ({"logprobs": 3, "top_k": 20}, {**penalised, "logprobs": 0}),
    )
    return [
        [
            oracle.settled(Case(f"{name} of {number}", prompt, {**seeded, **options}))  # type: ignore[typeddict-item]  # ours
            for name, prompt, options in zip(("first", "second"), PROMPTS, pair, strict=True)
        ]
        for number, pair in enumerate(every)
    ]


async def take_turns(served: Cluster, cases: list[Case], form: str, oracle: Oracle) -> int:
    """Ask all at once; how often anybody was preempted."""
    before = (await served.state()).preemptions
    results = await asyncio.gather(*(FORMS[form](served, case) for case in cases))
    for case, result in zip(cases, results, strict=True):
        check(case, result, oracle.result(case), form)
    return (await served.state()).preemptions - before


@pytest.mark.parametrize(("means", "num_stages"), MATRIX)
async def test_preempted_at_every_position(
    means: str,
    num_stages: int,
    tmp_path: Path,
    model_dir: Callable[[str], Path],
    oracle: Callable[[str], Oracle],
    profiles: Path,
) -> None:
    """Positions 1 to 53, so 1, 8, 9 and 50 are among them; penalised beside unpenalised. The pool holds one of two."""
    journal = tmp_path / "journal"
    flags = (*TURNS, *ONE_AT_A_TIME, "--kv-policy", means, "--journal", str(journal))
    host_blocks = 4 * SMALL_POOL if means in SWAPPING else 0
    plan = Plan("llama", num_stages, SMALL_POOL, SMALL_POOL * BLOCK_SIZE, host_blocks, flags)
    every = pairs(oracle("llama"))
    async with cluster(tmp_path, model_dir("llama"), profiles, plan) as served:
        for cases, form in zip(every, ("gRPC", "HTTP stream", "gRPC stream"), strict=True):
            await take_turns(served, cases, form, oracle("llama"))
    check_positions(lost_kv_at(journal, "swap" if means in SWAPPING else "recompute"), 2 * len(every))


def check_positions(positions: dict[int, set[int]], num_jobs: int) -> None:
    """One may end long before the other, or begin long after; but between them they leave nothing out."""
    assert len(positions) == num_jobs
    for job_id, at in positions.items():
        missed = set(range(1, NUM_TOKENS)) - at
        assert len(missed) < NUM_TOKENS // 2, f"job {job_id} was not preempted after token {sorted(missed)}"
    assert set.union(*positions.values()) >= set(range(1, NUM_TOKENS))


async def test_turns_are_lost_at_every_position(
    tmp_path: Path, model_dir: Callable[[str], Path], oracle: Callable[[str], Oracle], profiles: Path
) -> None:
    """Nobody's KV moves: one runs at a time, and both stay on the device."""
    journal = tmp_path / "journal"
    plan = Plan(scheduler_flags=(*TURNS, *ONE_AT_A_TIME, "--journal", str(journal)))
    every = pairs(oracle("llama"))
    async with cluster(tmp_path, model_dir("llama"), profiles, plan) as served:
        for cases, form in zip(every, ("gRPC stream", "HTTP", "gRPC"), strict=True):
            await take_turns(served, cases, form, oracle("llama"))
    check_positions(lost_turn_at(journal), 2 * len(every))


@pytest.mark.parametrize("means", [pytest.param(name, marks=FULL) for name in MEANS])
async def test_eight_that_do_not_fit_together(
    means: str, tmp_path: Path, model_dir: Callable[[str], Path], oracle: Callable[[str], Oracle], profiles: Path
) -> None:
    """Each beside seven others, in batches of two, on GPT-2: preempted by the way, not at every step."""
    cases = [case for pair in pairs(oracle("gpt2")) for case in pair]
    cases += [case.with_(seed=case.options["seed"] + 1000, max_tokens=20) for case in cases[:2]]
    cases = [oracle("gpt2").settled(case) for case in cases]
    host_blocks = 64 if means in SWAPPING else 0
    flags = (*TURNS, "--max-num-seqs", "2", "--kv-policy", means, "--prefill-chunk-tokens", "24")
    plan = Plan("gpt2", 2, 18, 144, host_blocks, flags)
    async with cluster(tmp_path, model_dir("gpt2"), profiles, plan) as served:
        for form in ("HTTP", "gRPC stream"):
            assert await take_turns(served, cases, form, oracle("gpt2")) > 50
