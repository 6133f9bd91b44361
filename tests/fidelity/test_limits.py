"""What is advertised is what is enforced, to the token; what can never fit harms nobody."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from fastserve import InvalidRequestError

from .case import Case, check
from .cluster import Cluster, Plan, cluster
from .forms import FORMS
from .models import BLOCK_SIZE
from .oracle import Oracle

NUM_BLOCKS = 6
USABLE = NUM_BLOCKS * BLOCK_SIZE
PROMPT = "Room for one only, so be brief."
NEIGHBOUR = Case("neighbour", "hello", {"temperature": 0, "max_tokens": 5})


async def refused(served: Cluster, case: Case) -> None:
    """Over HTTP and gRPC alike, in a sentence that names the limit and what was asked for."""
    response = await served.http.post("/v1/completions", json={"prompt": case.prompt, **case.options})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert str(USABLE) in error["message"]
    with pytest.raises(InvalidRequestError, match=str(USABLE)):
        await served.sdk.generate(case.prompt, **case.options)


@pytest.mark.parametrize("num_stages", [1, pytest.param(2, marks=pytest.mark.full)])
async def test_a_request_at_the_edge_of_the_pool(
    num_stages: int,
    tmp_path: Path,
    model_dir: Callable[[str], Path],
    oracle: Callable[[str], Oracle],
    profiles: Path,
) -> None:
    """One token less than the pool holds, as many, one more; each with a neighbour that comes just after."""
    plan = Plan("llama", num_stages, NUM_BLOCKS, USABLE)
    async with cluster(tmp_path, model_dir("llama"), profiles, plan) as served:
        assert (await served.sdk.model_info()).max_model_len == USABLE
        models = (await served.http.get("/v1/models")).json()
        assert [model["max_model_len"] for model in models["data"]] == [USABLE]
        for total in (USABLE - 1, USABLE, USABLE + 1):
            edge = Case("edge", PROMPT, {"temperature": 0, "ignore_eos": True, "max_tokens": total - len(PROMPT)})
            for form in ("HTTP", "gRPC stream"):
                first = asyncio.create_task(_ask(served, edge, form, oracle("llama")))
                await asyncio.sleep(0)
                check(NEIGHBOUR, await FORMS[form](served, NEIGHBOUR), oracle("llama").result(NEIGHBOUR), form)
                await first
        unbounded = Case("what fits", PROMPT, {"temperature": 0, "ignore_eos": True})
        whole = await served.sdk.generate(unbounded.prompt, **unbounded.options)
        assert whole.usage.prompt_tokens + whole.usage.completion_tokens == USABLE, "the default is what fits"


async def _ask(served: Cluster, edge: Case, form: str, oracle: Oracle) -> None:
    if edge.options["max_tokens"] + len(edge.prompt) > USABLE:
        await refused(served, edge)
        return
    wanted = oracle.result(edge)
    assert len(wanted.answers[0].token_ids or ()) == edge.options["max_tokens"]
    check(edge, await FORMS[form](served, edge), wanted, form)


async def test_a_lower_limit_of_the_operator_counts(
    tmp_path: Path, model_dir: Callable[[str], Path], profiles: Path
) -> None:
    """Set at the gateway or at the scheduler: advertised and enforced alike."""
    plan = Plan("llama", 1, 20, 160, 0, ("--max-model-len", "140"), {"max_model_len": USABLE})
    async with cluster(tmp_path, model_dir("llama"), profiles, plan) as served:
        assert (await served.sdk.model_info()).max_model_len == USABLE
        for total, fits in ((USABLE, True), (USABLE + 1, False)):
            case = Case("at the limit", PROMPT, {"ignore_eos": True, "max_tokens": total - len(PROMPT)})
            if fits:
                answer = await served.sdk.generate(case.prompt, **case.options)
                assert answer.usage.completion_tokens == case.options["max_tokens"]
            else:
                await refused(served, case)
