"""Recorded traffic, replayed on its own clock. Files are the user's; `.gz` is read as it is.

Azure LLM inference traces (github.com/Azure/AzurePublicDataset, CC BY 4.0): TIMESTAMP,ContextTokens,GeneratedTokens.
BurstGPT (github.com/HPMLL/BurstGPT, CC BY 4.0): Timestamp,...,Request tokens,Response tokens,... in seconds.
Mooncake (github.com/kvcache-ai/Mooncake): JSON lines of timestamp (ms), input_length, output_length, hash_ids.
"""

import csv
import gzip
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from fastserve.bench.workload import PromptMaker, Request, Shape, WorkloadError

#: Tokens that one of Mooncake's hash ids stands for.
MOONCAKE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Arrival:
    """One row of a trace. `blocks`: ids of the prompt's blocks where the trace tells, for prefixes that are shared."""

    time_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


def replay(
    read: Callable[[IO[str]], Iterator[Arrival]],
    path: Path,
    num_requests: int,
    shape: Shape,
    prompts: PromptMaker,
    time_scale: float,
) -> list[Request]:
    """The trace's first `num_requests` with at least one token each way; the first is sent at 0 and every gap is
    multiplied by `time_scale` (0.5: twice as fast). Raises WorkloadError for a file that cannot be read as this trace.
    """
    if not time_scale > 0:
        raise WorkloadError(f"--time-scale must be above 0 (got {time_scale})")
    rows = _read_rows(read, path, num_requests)
    if not rows:
        raise WorkloadError(f"{path} has no usable request")
    rows.sort(key=lambda row: row.time_s)
    return [_to_request(row, (row.time_s - rows[0].time_s) * time_scale, shape, prompts) for row in rows]


def _read_rows(read: Callable[[IO[str]], Iterator[Arrival]], path: Path, num_requests: int) -> list[Arrival]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            usable = (row for row in read(file) if row.input_tokens > 0 and row.output_tokens > 0)
            return list(itertools.islice(usable, num_requests))
    except OSError as error:
        raise WorkloadError(f"cannot read {path}: {error.strerror or error}") from error
    except KeyError as error:
        raise WorkloadError(f"{path} is not this kind of trace: it has no {error.args[0]!r}") from error
    except (ValueError, TypeError) as error:
        raise WorkloadError(f"{path} is not this kind of trace: {error}") from error


def _to_request(row: Arrival, arrival_s: float, shape: Shape, prompts: PromptMaker) -> Request:
    num_input, num_output = shape.apply(row.input_tokens, row.output_tokens)
    shared = [i for block in row.blocks for i in prompts.block(block, MOONCAKE_BLOCK_TOKENS)][:num_input]
    return Request(tuple(shared) + prompts.ids(num_input - len(shared)), num_input, num_output, arrival_s)


def read_azure(file: IO[str]) -> Iterator[Arrival]:
    for row in csv.DictReader(file):
        # Seven digits of a second; Python reads six.
        time = datetime.fromisoformat(row["TIMESTAMP"][:26]).replace(tzinfo=UTC)
        yield Arrival(time.timestamp(), int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def read_burstgpt(file: IO[str]) -> Iterator[Arrival]:
    for row in csv.DictReader(file):
        yield Arrival(float(row["Timestamp"]), int(row["Request tokens"]), int(row["Response tokens"]))


def read_mooncake(file: IO[str]) -> Iterator[Arrival]:
    for line in filter(str.strip, file):
        row = json.loads(line)
        blocks = tuple(int(i) for i in row.get("hash_ids", ()))
        yield Arrival(float(row["timestamp"]) / 1000, int(row["input_length"]), int(row["output_length"]), blocks)


READERS: dict[str, Callable[[IO[str]], Iterator[Arrival]]] = {
    "azure": read_azure,
    "burstgpt": read_burstgpt,
    "mooncake": read_mooncake,
}
