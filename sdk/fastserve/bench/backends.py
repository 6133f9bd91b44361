"""The servers that can be measured. A backend turns one request into pieces with arrival times.

A backend fills a `Reply` as the answer comes, so that what arrived before a failure or a timeout is not lost.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from fastserve.bench.workload import Request


class BackendError(Exception):
    """The request failed; the message says how."""


@dataclass(slots=True)
class Reply:
    """`arrival_s`: of each piece, on `time.perf_counter`'s clock. `counts` of tokens: 0 until the server has told."""

    arrival_s: list[float] = field(default_factory=list)
    token_counts: list[int] = field(default_factory=list)
    end_s: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    texts: list[str] = field(default_factory=list)

    def piece(self, now_s: float, tokens: int, text: str) -> None:
        self.arrival_s.append(now_s)
        self.token_counts.append(tokens)
        self.end_s = now_s
        self.texts.append(text)


@dataclass(frozen=True, slots=True)
class Target:
    """The model as the server describes it. `vocab_size` is a safe guess where it does not tell."""

    model: str
    root: str
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Decoding:
    """How every answer is generated. `extra`: fields added to an HTTP request body as they are."""

    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    ignore_eos: bool = False
    seed: int | None = None
    extra: Mapping[str, object] = field(default_factory=dict)


class Backend(Protocol):
    name: str

    async def describe(self) -> Target:
        """Raises BackendError when the server does not answer."""

    async def count_tokens(self, text: str) -> int:
        """By the server's tokeniser. Raises BackendError."""

    def prepare(self, request: Request) -> object:
        """Whatever can be done before the clock runs."""

    async def generate(self, prepared: object, reply: Reply) -> None:
        """Raises BackendError; cancellation aborts the request."""

    async def close(self) -> None: ...
