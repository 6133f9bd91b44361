"""Recorded traffic as public traces tell it: when, and how long. Files are the user's; `.gz` is read as it is.

Azure LLM inference traces (github.com/Azure/AzurePublicDataset, CC BY 4.0): TIMESTAMP,ContextTokens,GeneratedTokens.
BurstGPT (github.com/HPMLL/BurstGPT, CC BY 4.0): Timestamp,...,Request tokens,Response tokens,... in seconds.
Mooncake (github.com/kvcache-ai/Mooncake): JSON lines of timestamp (ms), input_length, output_length, hash_ids.
"""

import csv
import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

#: Tokens that one of Mooncake's hash ids stands for.
MOONCAKE_BLOCK_TOKENS = 512


class TraceError(ValueError):
    """A sentence for the person who named the file."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One row of a trace. `blocks`: ids of the prompt's blocks where the trace tells, for prefixes that are shared."""

    time_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


def read_rows(kind: str, path: Path) -> Iterator[Arrival]:
    """The rows with at least one token each way, one at a time, in the file's order. Raises TraceError for a file that
    cannot be read as a trace of this `kind`, when that shows.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            yield from (row for row in READERS[kind](file) if row.input_tokens > 0 and row.output_tokens > 0)
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror or error}") from error
    except KeyError as error:
        raise TraceError(f"{path} is not this kind of trace: it has no {error.args[0]!r}") from error
    except (ValueError, TypeError) as error:
        raise TraceError(f"{path} is not this kind of trace: {error}") from error


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
