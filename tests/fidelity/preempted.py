"""Where requests lost their KV or their turn, read from the scheduler's journal."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any


def lost_kv_at(journal: Path, kind: str) -> dict[int, set[int]]:
    """Job id -> how many tokens of its answer it had when it lost its KV and then went on: computed again for
    `recompute`, brought back from the host for `swap`."""
    positions: dict[int, set[int]] = defaultdict(set)
    computed: dict[int, int] = defaultdict(int)
    output: dict[int, int] = defaultdict(int)
    for plan in _plans(journal):
        for _, _, job_id, direction, *_ in plan[4] if len(plan) > 4 else []:
            if kind == "swap" and direction == "in":
                positions[job_id].add(output[job_id])
        for _, job_id, start, num_tokens, sample, position, _ in plan[3]:
            if kind == "recompute" and start < computed[job_id]:
                positions[job_id].add(output[job_id])
            computed[job_id] = start + num_tokens
            output[job_id] = position + 1 if sample else output[job_id]
    return positions


def lost_turn_at(journal: Path) -> dict[int, set[int]]:
    """Job id -> how many tokens of its answer it had when another one ran instead, for batches of one."""
    positions: dict[int, set[int]] = defaultdict(set)
    running, tokens = 0, 0
    for _, _, _, items, *_ in _plans(journal):
        ((_, job_id, _, _, sample, position, _),) = items
        if job_id != running and running:
            positions[running].add(tokens)
        running, tokens = job_id, position + 1 if sample else 0
    return positions


def _plans(journal: Path) -> list[list[Any]]:
    with journal.open() as lines:
        next(lines)
        entries = [json.loads(line) for line in lines]
    return [command for _, _, commands in entries for command in commands if command[0] == "RunIteration"]
