"""What is sent: requests, and where their prompts come from."""

import json
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fastserve_common.load.lengths import LengthModel

#: The classic ShareGPT filter (vLLM's): no prompt above this, no pair above that, nothing shorter than the last.
SHAREGPT_MAX_INPUT_TOKENS = 1024
SHAREGPT_MAX_TOTAL_TOKENS = 2048
SHAREGPT_MIN_TOKENS = 4

#: Vocabulary assumed when the server does not tell: every model has at least this many ids.
DEFAULT_VOCAB_SIZE = 1000

#: Tokenises one text, wherever the tokeniser is.
CountTokens = Callable[[str], Awaitable[int]]


class WorkloadError(ValueError):
    """A sentence for the person who asked for the workload."""


@dataclass(frozen=True, slots=True)
class Request:
    """`output_tokens`: asked for, as the limit. `arrival_s`: of a trace; None when the arrival process decides."""

    prompt: str | tuple[int, ...]
    input_tokens: int
    output_tokens: int
    arrival_s: float | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """How drawn lengths are fitted to the model that is measured: scaled first, then clipped; never below 1 token."""

    input_scale: float = 1.0
    output_scale: float = 1.0
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None

    def apply(self, num_input: int, num_output: int) -> tuple[int, int]:
        return (
            _fit(num_input, self.input_scale, self.max_input_tokens),
            _fit(num_output, self.output_scale, self.max_output_tokens),
        )


def _fit(tokens: int, scale: float, most: int | None) -> int:
    scaled = max(round(tokens * scale), 1)
    return scaled if most is None else min(scaled, most)


@dataclass(frozen=True, slots=True)
class PromptMaker:
    """Prompts of ids that no model gives a meaning: the middle half of the vocabulary, clear of special tokens."""

    rng: random.Random
    vocab_size: int = DEFAULT_VOCAB_SIZE

    def ids(self, count: int) -> tuple[int, ...]:
        return tuple(self.rng.choices(self._alphabet(), k=count))

    def block(self, content: int, count: int) -> tuple[int, ...]:
        """The same ids for the same `content`: prefixes that a trace shares stay shared."""
        return tuple(random.Random(content).choices(self._alphabet(), k=count))

    def _alphabet(self) -> range:
        return range(self.vocab_size // 4, max(self.vocab_size * 3 // 4, self.vocab_size // 4 + 1))


def like(model: LengthModel, num_requests: int, shape: Shape, prompts: PromptMaker) -> list[Request]:
    """Generated lengths of a public data set."""
    pairs = [shape.apply(*model.draw(prompts.rng)) for _ in range(num_requests)]
    return [Request(prompts.ids(num_input), num_input, num_output) for num_input, num_output in pairs]


def uniform(
    num_requests: int, input_tokens: int, output_tokens: int, spread: float, prompts: PromptMaker
) -> list[Request]:
    """Lengths uniform in [x (1 - spread), x (1 + spread)]. Raises WorkloadError for a spread outside [0, 1)."""
    if not 0 <= spread < 1:
        raise WorkloadError(f"--random-range-ratio must be in [0, 1) (got {spread})")

    def draw(tokens: int) -> int:
        return prompts.rng.randint(max(int(tokens * (1 - spread)), 1), max(int(tokens * (1 + spread)), 1))

    pairs = [(draw(input_tokens), draw(output_tokens)) for _ in range(num_requests)]
    return [Request(prompts.ids(num_input), num_input, num_output) for num_input, num_output in pairs]


async def sharegpt(
    path: Path, num_requests: int, shape: Shape, rng: random.Random, count_tokens: CountTokens
) -> list[Request]:
    """First rounds of a ShareGPT-format file, in an order drawn from `rng`; as text, and outputs as long as the file's.

    Only as many texts are tokenised as needed. `shape` scales the outputs only: a text is what it is. Raises
    WorkloadError for a file of another format, or without enough conversations that pass the filter.
    """
    rounds = _first_rounds(path)
    rng.shuffle(rounds)
    found: list[Request] = []
    for prompt, reference in rounds:
        if len(found) == num_requests:
            break
        num_input, num_output = await count_tokens(prompt), await count_tokens(reference)
        if _passes(num_input, num_output):
            found.append(Request(prompt, num_input, shape.apply(num_input, num_output)[1]))
    return repeat_to(found, num_requests, path)


def _passes(num_input: int, num_output: int) -> bool:
    return (
        min(num_input, num_output) >= SHAREGPT_MIN_TOKENS
        and num_input <= SHAREGPT_MAX_INPUT_TOKENS
        and num_input + num_output <= SHAREGPT_MAX_TOTAL_TOKENS
    )


def _first_rounds(path: Path) -> list[tuple[str, str]]:
    try:
        conversations = json.loads(path.read_text(encoding="utf-8"))
        return list(_pairs(conversations))
    except OSError as error:
        raise WorkloadError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise WorkloadError(
            f'{path} is not in ShareGPT format, [{{"conversations": [{{"value": ...}}, ...]}}, ...]: {error}'
        ) from error


def _pairs(conversations: Sequence[dict[str, list[dict[str, str]]]]) -> Iterator[tuple[str, str]]:
    for conversation in conversations:
        turns = conversation.get("conversations", [])
        if len(turns) >= 2:
            yield turns[0]["value"], turns[1]["value"]


def repeat_to(found: list[Request], num_requests: int, path: Path) -> list[Request]:
    """The first `num_requests`, again from the start when there are fewer. Raises WorkloadError when there is none."""
    if not found:
        raise WorkloadError(f"{path} has no usable request")
    return [found[i % len(found)] for i in range(num_requests)]


def as_text(request: Request) -> Request:
    """For an endpoint that takes text only: one short word per id. The server's own count is then what is reported."""
    if isinstance(request.prompt, str):
        return request
    return replace(request, prompt=" ".join(_WORDS[i % len(_WORDS)] for i in request.prompt))


_WORDS = ("the", "of", "and", "to", "in", "is", "it", "you", "that", "he", "was", "for", "on", "are", "with", "as")
