"""Where requests come from: generated lengths, ShareGPT files, recorded traces."""

import gzip
import json
import random
from pathlib import Path

import pytest

from fastserve.bench import workload
from fastserve.bench.traces import replay
from fastserve.bench.workload import PromptMaker, Request, Shape, WorkloadError
from fastserve_common.load.lengths import ALPACA


def maker(seed: int = 0, vocab_size: int = 100) -> PromptMaker:
    return PromptMaker(random.Random(seed), vocab_size)


async def count_words(text: str) -> int:
    return len(text.split())


def test_prompts_keep_clear_of_special_tokens() -> None:
    ids = maker(vocab_size=100).ids(1000)
    assert (min(ids), max(ids)) == (25, 74)
    assert maker(vocab_size=1).ids(2) == (0, 0)


def test_same_seed_same_workload() -> None:
    first, again, other = (workload.like(ALPACA, 20, Shape(), maker(seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert all(len(r.prompt) == r.input_tokens for r in first)


def test_lengths_are_scaled_then_clipped() -> None:
    assert Shape(0.5, 2.0, 40, 100).apply(100, 70) == (40, 100)
    assert Shape(0.5, 2.0).apply(100, 70) == (50, 140)
    assert Shape(0.001, 0.001).apply(100, 70) == (1, 1)


def test_uniform_lengths() -> None:
    fixed = workload.uniform(10, 8, 4, 0.0, maker())
    assert {(r.input_tokens, r.output_tokens) for r in fixed} == {(8, 4)}
    spread = workload.uniform(500, 10, 20, 0.5, maker())
    assert {r.input_tokens for r in spread} == set(range(5, 16))
    assert {r.output_tokens for r in spread} == set(range(10, 31))
    with pytest.raises(WorkloadError, match="random-range-ratio"):
        workload.uniform(1, 8, 4, 1.0, maker())


def write_sharegpt(path: Path, *rounds: tuple[int, int]) -> Path:
    conversations = [
        {"conversations": [{"from": "human", "value": f"p{i} " * a}, {"from": "gpt", "value": "a " * b}]}
        for i, (a, b) in enumerate(rounds)
    ]
    path.write_text(json.dumps([{"conversations": [{"value": "alone"}]}, {}, *conversations]))
    return path


async def test_sharegpt_keeps_what_passes_the_classic_filter(tmp_path: Path) -> None:
    path = write_sharegpt(tmp_path / "s.json", (5, 6), (3, 9), (9, 3), (1025, 5), (1000, 1049), (1000, 1048))
    found = await workload.sharegpt(path, 2, Shape(output_scale=0.5), random.Random(0), count_words)
    assert sorted((r.input_tokens, r.output_tokens) for r in found) == [(5, 3), (1000, 524)]
    assert all(isinstance(r.prompt, str) for r in found)


async def test_sharegpt_repeats_a_short_file_and_counts_no_more_than_it_needs(tmp_path: Path) -> None:
    path = write_sharegpt(tmp_path / "s.json", *[(5, 6)] * 10)
    counted = 0

    async def count(text: str) -> int:
        nonlocal counted
        counted += 1
        return 5

    assert len(await workload.sharegpt(path, 3, Shape(), random.Random(0), count)) == 3
    assert counted == 6
    assert len(await workload.sharegpt(path, 25, Shape(), random.Random(0), count)) == 25


@pytest.mark.parametrize(
    ("content", "said"), [("nonsense", "not in ShareGPT format"), ('{"a": 1}', "not in ShareGPT"), ("[]", "no usable")]
)
async def test_sharegpt_refuses_other_files(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "s.json"
    path.write_text(content)
    with pytest.raises(WorkloadError, match=said):
        await workload.sharegpt(path, 1, Shape(), random.Random(0), count_words)
    with pytest.raises(WorkloadError, match="cannot read"):
        await workload.sharegpt(tmp_path / "absent", 1, Shape(), random.Random(0), count_words)


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:48.6805900,10,0
2023-11-16 18:15:50.1805905,396,109
"""
BURSTGPT = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5,s,1.0,ChatGPT,472,18,490,Conversation log
45.5,s,1.0,GPT-4,20,30,50,API log
"""
MOONCAKE = """{"timestamp": 1000, "input_length": 600, "output_length": 7, "hash_ids": [1, 2]}

{"timestamp": 2500, "input_length": 700, "output_length": 8, "hash_ids": [1, 3]}
"""


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("azure", AZURE, [(0.0, 374, 44), (3.5, 396, 109)]),
        ("burstgpt", BURSTGPT, [(0.0, 472, 18), (40.5, 20, 30)]),
        ("mooncake", MOONCAKE, [(0.0, 600, 7), (1.5, 700, 8)]),
    ],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_traces_replay_on_their_own_clock(
    tmp_path: Path, name: str, text: str, expected: list[tuple[float, int, int]], zipped: bool
) -> None:
    path = tmp_path / ("t.gz" if zipped else "t")
    path.write_bytes(gzip.compress(text.encode()) if zipped else text.encode())
    found = replay(name, path, 10, Shape(), maker(), 2.0)
    assert [r.arrival_s for r in found] == pytest.approx([time_s * 2.0 for time_s, _, _ in expected], abs=1e-5)
    assert [(r.input_tokens, r.output_tokens) for r in found] == [(a, b) for _, a, b in expected]
    assert all(len(r.prompt) == r.input_tokens for r in found)
    assert len(replay(name, path, 1, Shape(), maker(), 1.0)) == 1


def test_shared_blocks_are_shared_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text(MOONCAKE)
    first, second = replay("mooncake", path, 2, Shape(), maker(), 1.0)
    assert first.prompt[:512] == second.prompt[:512]
    assert first.prompt[512:600] != second.prompt[512:600]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("azure", BURSTGPT, "no 'TIMESTAMP'"),
        ("burstgpt", AZURE, "no 'Timestamp'"),
        ("mooncake", "{}", "no 'timestamp'"),
        ("mooncake", "x", "not this kind"),
        ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n", "not this kind"),
        ("azure", "", "no usable"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, name: str, text: str, said: str) -> None:
    path = tmp_path / "t"
    path.write_text(text)
    with pytest.raises(WorkloadError, match=said):
        replay(name, path, 1, Shape(), maker(), 1.0)


def test_unreadable_traces(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="cannot read"):
        replay("azure", tmp_path / "absent", 1, Shape(), maker(), 1.0)
    fake = tmp_path / "t.gz"
    fake.write_text("not zipped")
    with pytest.raises(WorkloadError, match="cannot read"):
        replay("azure", fake, 1, Shape(), maker(), 1.0)
    with pytest.raises(WorkloadError, match="time-scale"):
        replay("azure", fake, 1, Shape(), maker(), 0.0)


def test_ids_become_words_where_only_text_is_taken() -> None:
    assert workload.as_text(Request((0, 1, 17), 3, 1)).prompt == "the of of"
    assert workload.as_text(Request("as it is", 3, 1)).prompt == "as it is"
