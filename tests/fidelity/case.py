"""One request in words that every API is translated from, and what came back in words that every answer fits in."""

from dataclasses import dataclass, field, replace

from fastserve.types import GenerateOptions

#: What a token was given: its log-probability, and those of the most likely tokens, falling.
Logprobs = list[tuple[float, list[float]]]


@dataclass(frozen=True, slots=True)
class Case:
    """`options` with a seed unless greedy. `max_tokens` is among them."""

    name: str
    prompt: str
    options: GenerateOptions = field(default_factory=GenerateOptions)

    def with_(self, **options: object) -> "Case":
        return replace(self, options={**self.options, **options})  # type: ignore[typeddict-item]  # checked by the API


@dataclass(slots=True)
class Seen:
    """One answer. `token_ids` None: this API does not say them. `logprobs` None: not asked for."""

    text: str
    finish: str
    stop: int | str | None
    token_ids: list[int] | None = None
    logprobs: Logprobs | None = None


@dataclass(slots=True)
class Result:
    answers: list[Seen]
    prompt_tokens: int
    completion_tokens: int


def check(case: Case, got: Result, wanted: Result, form: str) -> None:
    """The same to the last token and character; log-probabilities to 1e-4."""
    what = f"{case.name} over {form}"
    assert len(got.answers) == len(wanted.answers), what
    for index, (answer, expected) in enumerate(zip(got.answers, wanted.answers, strict=True)):
        where = f"{what}, answer {index}"
        if answer.token_ids is not None:
            assert answer.token_ids == expected.token_ids, where
        assert answer.text == expected.text, where
        assert (answer.finish, answer.stop) == (expected.finish, expected.stop), where
        _check_logprobs(answer.logprobs, expected.logprobs, where)
    counted = (got.prompt_tokens, got.completion_tokens)
    assert counted == (wanted.prompt_tokens, wanted.completion_tokens), what


def _check_logprobs(got: Logprobs | None, wanted: Logprobs | None, where: str) -> None:
    assert (got is None) == (wanted is None), where
    for position, (entry, expected) in enumerate(zip(got or [], wanted or [], strict=True)):
        assert abs(entry[0] - expected[0]) < 1e-4, f"{where}, token {position}"
        assert len(entry[1]) == len(expected[1]), f"{where}, token {position}"
        assert all(abs(a - b) < 1e-4 for a, b in zip(entry[1], expected[1], strict=True)), f"{where}, token {position}"
