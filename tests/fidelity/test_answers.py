"""Whatever is asked for, however it is asked for, alone or among others, on any number of stages: one right answer."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from .case import Case, check
from .cases import all_cases
from .cluster import Cluster, Plan, cluster
from .forms import FORMS
from .oracle import Oracle

MATRIX = [
    ("llama", 2),
    pytest.param("llama", 1, marks=pytest.mark.full),
    pytest.param("llama", 3, marks=pytest.mark.full),
    pytest.param("gpt2", 1, marks=pytest.mark.full),
    pytest.param("gpt2", 3, marks=pytest.mark.full),
]


async def ask_all(served: Cluster, oracle: Oracle, cases: list[Case], form: str) -> None:
    """All at once: each is the others' neighbour."""
    results = await asyncio.gather(*(FORMS[form](served, case) for case in cases))
    for case, result in zip(cases, results, strict=True):
        check(case, result, oracle.result(case), form)


@pytest.mark.parametrize(("kind", "num_stages"), MATRIX)
async def test_every_option_in_every_form(
    kind: str,
    num_stages: int,
    tmp_path: Path,
    model_dir: Callable[[str], Path],
    oracle: Callable[[str], Oracle],
    profiles: Path,
) -> None:
    cases = all_cases(oracle(kind))
    async with cluster(tmp_path, model_dir(kind), profiles, Plan(kind, num_stages)) as served:
        for case in cases:
            check(case, await FORMS["gRPC"](served, case), oracle(kind).result(case), "gRPC, alone")
        for form in FORMS:
            await ask_all(served, oracle(kind), cases, form)
