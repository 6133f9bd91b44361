"""A stage divided among ranks answers as one that is not, and each rank reads and keeps its share only."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from fastserve_worker.engine import BatchRow, KvPool, PagedBatch, StageModel, UnsupportedModelError
from fastserve_worker.engine.linear import LINEAR_KINDS
from fastserve_worker.ranks.errors import TurnOverError
from fastserve_worker.ranks.group import RankGroup

from .models import TinyModel

CPU = torch.device("cpu")
TIMEOUT_S = 60.0
BLOCKS = range(8)

T = TypeVar("T")


def in_ranks(size: int, work: Callable[[RankGroup], T]) -> list[T]:
    """What each rank makes of it, one thread each."""
    store = HashStore()

    def run(rank: int) -> T:
        return work(RankGroup(store, rank, size, device=CPU, timeout_s=TIMEOUT_S))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


#: transformers initialises models by process-wide means.
LOADING = threading.Lock()


def load(model: TinyModel, group: RankGroup, stage: int, num_stages: int, linear: str = "auto") -> StageModel:
    with LOADING:
        return StageModel.load(
            model.folder,
            stage=stage,
            num_stages=num_stages,
            dtype=torch.float32,
            device=CPU,
            linear=linear,
            ranks=group,
        )


def answer(group: RankGroup, stages: list[StageModel], prompt: list[int], count: int) -> list[int]:
    """Greedy, one sequence; rank 0 draws and shares what it drew."""
    pools = [KvPool.for_model(stage.config, num_blocks=len(BLOCKS), device=CPU) for stage in stages]
    tokens, start = list(prompt), 0
    output: list[int] = []
    while len(output) < count:
        hidden = torch.tensor(tokens[start:])
        for stage, pool in zip(stages, pools, strict=True):
            hidden = stage.forward(
                hidden, PagedBatch([BatchRow(start, len(tokens) - start, BLOCKS, sample=True)], pool)
            )
            if stage is not stages[-1]:
                group.share(hidden)
        drawn = hidden.argmax(-1) if group.rank == 0 else torch.zeros(1, dtype=torch.int64)
        group.share(drawn)
        start = len(tokens)
        tokens.append(int(drawn))
        output.append(int(drawn))
    return output


@pytest.mark.parametrize("num_stages", [pytest.param(1, marks=pytest.mark.full), 2])
@pytest.mark.parametrize("name", ["llama-gqa", "qwen2", "qwen3", "mistral-window", "gemma2-softcap", "gpt-neox"])
def test_two_ranks_answer_as_transformers_does(
    name: str, num_stages: int, tiny_model: Callable[[str], TinyModel]
) -> None:
    model = tiny_model(name)

    def work(group: RankGroup) -> list[list[int]]:
        stages = [load(model, group, stage, num_stages) for stage in range(num_stages)]
        return [answer(group, stages, list(prompt), len(model.expected[0])) for prompt in model.prompts]

    for answers in in_ranks(2, work):
        assert answers == model.expected


@pytest.mark.parametrize("linear", [kind for kind in LINEAR_KINDS if kind not in ("auto", "fp16")])
def test_every_exact_kind_of_linear_layer_is_summed(linear: str, tiny_model: Callable[[str], TinyModel]) -> None:
    model = tiny_model("llama-gqa")

    def work(group: RankGroup) -> list[int]:
        return answer(group, [load(model, group, 0, 1, linear)], list(model.prompts[0]), len(model.expected[0]))

    assert in_ranks(2, work) == [model.expected[0]] * 2


def test_a_rank_holds_its_share_of_layers_and_kv(tiny_model: Callable[[str], TinyModel]) -> None:
    model = tiny_model("llama-gqa")

    def sizes(group: RankGroup) -> tuple[int, int, int, bool]:
        stage = load(model, group, 0, 1, "torch")
        divided = sum(p.numel() for name, p in stage._model.named_parameters() if "_proj" in name)
        head = sum(p.numel() for name, p in stage._model.named_parameters() if "lm_head" in name)
        return divided, head, stage.config.num_kv_heads, stage.is_last

    whole = StageModel.load(model.folder, stage=0, num_stages=1, dtype=torch.float32, device=CPU, linear="torch")
    parameters = dict(whole._model.named_parameters())
    divided = sum(p.numel() for name, p in parameters.items() if "_proj" in name)
    head = parameters["lm_head.weight"].numel()
    assert in_ranks(2, sizes) == [(divided // 2, head, 1, True), (divided // 2, 0, 1, False)]


@pytest.mark.parametrize(
    ("name", "size", "why"),
    [
        ("opt", 2, "opt has no tensor-parallel plan in transformers; use more stages"),
        ("llama-mqa-tied", 2, "llama has 1 KV heads, which 2 ranks cannot share"),
        ("llama-gqa", 3, "llama has 4 attention heads, which 3 ranks cannot share"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    name: str, size: int, why: str, tiny_model: Callable[[str], TinyModel]
) -> None:
    model = tiny_model(name)

    def work(group: RankGroup) -> str:
        with pytest.raises(UnsupportedModelError) as error:
            load(model, group, 0, 1)
        return str(error.value)

    assert in_ranks(size, work) == [why] * size


def test_others_leave_out_what_rank_0_passed_over() -> None:
    def work(group: RankGroup) -> list[str]:
        if group.rank == 0:
            for turn in ((1, -1, 0), (1, 0, 0), (2, -1, 0), (2, 0, 0)):
                group.begin(turn)
            return []
        said = []
        for turn in ((1, 0, 0), (1, 1, 0), (1, 2, 0), (2, 0, 0)):
            try:
                group.begin(turn)
                said.append("computed")
            except TurnOverError:
                said.append("passed over")
        return said

    assert in_ranks(2, work)[1] == ["computed", "passed over", "passed over", "computed"]


@pytest.mark.full
def test_who_never_comes_is_waited_for_so_long_only() -> None:
    def work(group: RankGroup) -> None:
        if group.rank == 0:
            with pytest.raises(RuntimeError):
                group.add_up(torch.zeros(1))

    store = HashStore()

    def run(rank: int) -> None:
        work(RankGroup(store, rank, 2, device=CPU, timeout_s=10.0))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, range(2)))
