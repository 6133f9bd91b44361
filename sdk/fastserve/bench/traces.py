"""Recorded traffic, replayed on its own clock."""

import itertools
from pathlib import Path

from fastserve.bench.workload import PromptMaker, Request, Shape, WorkloadError
from fastserve_common.load.traces import MOONCAKE_BLOCK_TOKENS, Arrival, TraceError, read_rows


def replay(
    kind: str, path: Path, num_requests: int, shape: Shape, prompts: PromptMaker, time_scale: float
) -> list[Request]:
    """The trace's first `num_requests` with at least one token each way; the first is sent at 0 and every gap is
    multiplied by `time_scale` (0.5: twice as fast). Raises WorkloadError for a file that cannot be read as this trace.
    """
    if not time_scale > 0:
        raise WorkloadError(f"--time-scale must be above 0 (got {time_scale})")
    try:
        rows = list(itertools.islice(read_rows(kind, path), num_requests))
    except TraceError as error:
        raise WorkloadError(str(error)) from error
    if not rows:
        raise WorkloadError(f"{path} has no usable request")
    rows.sort(key=lambda row: row.time_s)
    return [_to_request(row, (row.time_s - rows[0].time_s) * time_scale, shape, prompts) for row in rows]


def _to_request(row: Arrival, arrival_s: float, shape: Shape, prompts: PromptMaker) -> Request:
    num_input, num_output = shape.apply(row.input_tokens, row.output_tokens)
    shared = [i for block in row.blocks for i in prompts.block(block, MOONCAKE_BLOCK_TOKENS)][:num_input]
    return Request(tuple(shared) + prompts.ids(num_input - len(shared)), num_input, num_output, arrival_s)
