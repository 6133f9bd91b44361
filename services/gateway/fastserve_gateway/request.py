"""From what a caller asked for to one checked, frozen request: the same for HTTP and gRPC.

Both shapes fill `RequestFields`; `RequestBuilder` checks every value against the named limits, tokenises, and
refuses with a sentence that names the field as the caller spelled it.
"""

import math
import random
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fastserve_common.errors import InvalidArgumentError, NotFoundError
from fastserve_gateway import limits
from fastserve_gateway.checks import Checks
from fastserve_gateway.quota import Quota
from fastserve_gateway.text.model import TextModel
from fastserve_gateway.text.stops import StopAutomaton

#: `#` is ours: it separates a request's id from the number of the answer.
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/@+=~-]+\Z")


class ContextLengthError(InvalidArgumentError):
    """Prompt + answer can never fit."""


class ModelNotFoundError(NotFoundError):
    """The request names a model that is not served here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFields:
    """What a caller may set. None: not set. Types are right, values are not checked yet."""

    prompts: Sequence[str | Sequence[int]]
    request_id: str | None = None
    model: str | None = None
    add_special_tokens: bool = True
    n: int | None = None
    #: None: `default_max_tokens`, or whatever fits when that is None too.
    max_tokens: int | None = None
    default_max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    #: 0 and -1 are off.
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    echo: bool = False
    priority: int | None = None
    expected_output_tokens: int | None = None
    program: str | None = None
    delivered: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: Sequence[int]
    #: As the caller gave it; None when given as ids.
    text: str | None
    #: Most tokens that an answer to this prompt may have.
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn; every value set and in range. Zero top_k, min_p: off."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    logprobs: int | None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request that may be sent to the scheduler. Answer `k` belongs to prompt `k // n`."""

    request_id: str
    model: str
    prompts: tuple[Prompt, ...]
    n: int
    sampling: Sampling
    min_tokens: int
    #: End-of-sequence ids included, unless the caller ignores them.
    stop_token_ids: frozenset[int]
    stops: StopAutomaton | None
    include_stop: bool
    echo: bool
    priority: int
    #: The caller's guess of the answer's length; 0: none.
    expected_output_tokens: int
    #: What all requests of one agent share; "": it is alone.
    program: str
    #: What an earlier stream of the answer has delivered; it goes on behind them.
    delivered: Sequence[int] = ()
    #: What the caller may still ask for; None: there is no limit.
    quota: Quota | None = None

    @property
    def num_asked_tokens(self) -> int:
        """Of all prompts, and the most that all answers may have."""
        return self.num_prompt_tokens + self.n * sum(prompt.max_tokens for prompt in self.prompts)

    @property
    def num_answers(self) -> int:
        return len(self.prompts) * self.n

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.ids) for prompt in self.prompts)

    def seed_of(self, answer: int) -> int:
        """Answers to one prompt differ; the same seed gives the same set of answers. Wraps within int64."""
        seed = self.sampling.seed + answer % self.n
        return (seed - limits.INT64_MIN) % 2**64 + limits.INT64_MIN


class RequestBuilder:
    def __init__(
        self, text: TextModel, *, model_names: Sequence[str], max_prompt_bytes: int, seed: int | None = None
    ) -> None:
        """`seed`: where the seeds of requests that bring none are drawn from; None: from the system."""
        self._text = text
        self._model_names = tuple(model_names)
        self._max_prompt_bytes = max_prompt_bytes
        self._seeds = random.SystemRandom() if seed is None else random.Random(seed)

    def served_model(self, model: str | None) -> str:
        """The name to answer with. Raises ModelNotFoundError."""
        if not model:
            return self._model_names[0]
        if model not in self._model_names:
            raise ModelNotFoundError(f"the model {model[:200]!r} does not exist here; served: {self._model_names[0]}")
        return model

    async def build(
        self, fields: RequestFields, *, max_model_len: int, names: Mapping[str, str] | None = None
    ) -> GenerationRequest:
        """`max_model_len`: most tokens of prompt + answer. `names`: how this API spells the fields, where it differs.

        Raises InvalidArgumentError (with `param`), ContextLengthError, ModelNotFoundError.
        """
        checks = Checks(names or {})
        model = self.served_model(fields.model)
        request_id = _request_id(checks, fields.request_id)
        n = self._num_answers(checks, fields)
        sampling = self._sampling(checks, fields)
        min_tokens = checks.integer("min_tokens", fields.min_tokens, 0, 0, limits.UINT32_MAX)
        stops = _stop_strings(checks, fields.stop)
        stop_token_ids = self._stop_token_ids(checks, fields)
        priority = checks.integer("priority", fields.priority, 0, limits.INT32_MIN, limits.INT32_MAX)
        expected = checks.integer("expected_output_tokens", fields.expected_output_tokens, 0, 0, limits.UINT32_MAX)
        prompts = [await self._prompt(checks, fields, prompt, max_model_len, min_tokens) for prompt in fields.prompts]
        return GenerationRequest(
            request_id=request_id,
            model=model,
            prompts=tuple(prompts),
            n=n,
            sampling=sampling,
            min_tokens=min_tokens,
            stop_token_ids=stop_token_ids,
            stops=stops,
            include_stop=fields.include_stop,
            echo=fields.echo,
            priority=priority,
            expected_output_tokens=expected,
            program=_program(checks, fields.program),
            delivered=self._delivered(checks, fields, n, prompts),
        )

    def _delivered(self, checks: Checks, fields: RequestFields, n: int, prompts: Sequence[Prompt]) -> Sequence[int]:
        """Ids of an answer that goes on."""
        ids = tuple(fields.delivered)
        if not ids:
            return ()
        if n * len(prompts) != 1:
            raise checks.refuse("delivered", "is for requests with one answer")
        if len(ids) > prompts[0].max_tokens:
            raise checks.refuse("delivered", f"has {len(ids)} ids; the answer may have {prompts[0].max_tokens}")
        self._check_ids(checks, "delivered", ids)
        return ids

    def _num_answers(self, checks: Checks, fields: RequestFields) -> int:
        n = checks.integer("n", fields.n, 1, 1, limits.MAX_SEQUENCES)
        if not fields.prompts:
            raise checks.refuse("prompt", "is empty")
        if n * len(fields.prompts) > limits.MAX_SEQUENCES:
            raise checks.refuse("prompt", f"asks for more than {limits.MAX_SEQUENCES} answers (prompts times n)")
        return n

    def _sampling(self, checks: Checks, fields: RequestFields) -> Sampling:
        top_k = checks.integer("top_k", fields.top_k, 0, -1, limits.UINT32_MAX)
        seed = checks.integer("seed", fields.seed, self._seeds.getrandbits(63), limits.INT64_MIN, limits.INT64_MAX)
        logprobs = fields.logprobs
        if logprobs is not None:
            logprobs = checks.integer("logprobs", logprobs, 0, 0, limits.MAX_LOGPROBS)
        penalty = limits.MAX_PENALTY
        return Sampling(
            temperature=checks.real("temperature", fields.temperature, 1.0, 0.0, limits.MAX_TEMPERATURE),
            top_k=min(max(top_k, 0), self._text.vocab_size),
            top_p=checks.real("top_p", fields.top_p, 1.0, 0.0, 1.0, above=True),
            min_p=checks.real("min_p", fields.min_p, 0.0, 0.0, 1.0),
            seed=seed,
            presence_penalty=checks.real("presence_penalty", fields.presence_penalty, 0.0, -penalty, penalty),
            frequency_penalty=checks.real("frequency_penalty", fields.frequency_penalty, 0.0, -penalty, penalty),
            repetition_penalty=checks.real(
                "repetition_penalty", fields.repetition_penalty, 1.0, 0.0, limits.MAX_REPETITION_PENALTY, above=True
            ),
            logit_bias=self._logit_bias(checks, fields.logit_bias),
            logprobs=logprobs,
        )

    def _logit_bias(self, checks: Checks, bias: Mapping[int, float]) -> Mapping[int, float]:
        checks.at_most("logit_bias", bias, limits.MAX_LOGIT_BIAS_ENTRIES)
        self._check_ids(checks, "logit_bias", list(bias))
        return {
            token_id: checks.real("logit_bias", value, 0.0, -limits.MAX_LOGIT_BIAS, limits.MAX_LOGIT_BIAS)
            for token_id, value in bias.items()
        }

    def _stop_token_ids(self, checks: Checks, fields: RequestFields) -> frozenset[int]:
        checks.at_most("stop_token_ids", fields.stop_token_ids, limits.MAX_STOP_TOKEN_IDS)
        self._check_ids(checks, "stop_token_ids", fields.stop_token_ids)
        eos = frozenset[int]() if fields.ignore_eos else self._text.eos_token_ids
        return frozenset(fields.stop_token_ids) | eos

    def _check_ids(self, checks: Checks, name: str, ids: Sequence[int]) -> None:
        if ids and not (min(ids) >= 0 and max(ids) < self._text.vocab_size):
            raise checks.refuse(name, f"has a token id outside the vocabulary (0 to {self._text.vocab_size - 1})")

    async def _prompt(
        self, checks: Checks, fields: RequestFields, prompt: str | Sequence[int], max_model_len: int, min_tokens: int
    ) -> Prompt:
        text = prompt if isinstance(prompt, str) else None
        if isinstance(prompt, str):
            self._check_text(checks, prompt, max_model_len)
            ids: Sequence[int] = await self._text.encode(prompt, add_special_tokens=fields.add_special_tokens)
        else:
            ids = prompt
        if not ids:
            raise checks.refuse("prompt", "is empty: it has no tokens")
        # The length first: it bounds the work of everything after it.
        max_tokens = _max_tokens(checks, fields, len(ids), max_model_len, min_tokens)
        self._check_ids(checks, "prompt", ids)
        return Prompt(ids, text, max_tokens)

    def _check_text(self, checks: Checks, text: str, max_model_len: int) -> None:
        """Refuse what cannot fit before time is spent on splitting it into tokens."""
        try:
            size = len(text.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise checks.refuse("prompt", "has a lone surrogate, which is no character") from error
        if size > self._max_prompt_bytes:
            raise checks.refuse("prompt", f"has {size} bytes; the limit is {self._max_prompt_bytes}")
        longest = self._text.longest_piece_bytes
        if longest is not None and size > longest * max_model_len:
            raise _too_long(
                checks, f"the prompt of {size} bytes has at least {math.ceil(size / longest)}", max_model_len
            )

    async def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """For /tokenize: no model limit, but the byte limit. Raises InvalidArgumentError."""
        self._check_text(Checks({}), text, limits.UINT32_MAX)
        return await self._text.encode(text, add_special_tokens=add_special_tokens)

    async def detokenize(self, ids: Sequence[int], *, name: str) -> str:
        """Raises InvalidArgumentError for ids outside the vocabulary."""
        self._check_ids(Checks({}), name, ids)
        return await self._text.decode(ids)


def _too_long(checks: Checks, what: str, max_model_len: int) -> ContextLengthError:
    error = checks.refuse("prompt", "")
    return ContextLengthError(
        f"This model's maximum context length is {max_model_len} tokens (max_model_len), but {what}.", param=error.param
    )


def _max_tokens(checks: Checks, fields: RequestFields, prompt_tokens: int, max_model_len: int, min_tokens: int) -> int:
    room = max_model_len - prompt_tokens
    if room < 1:
        raise _too_long(checks, f"the prompt has {prompt_tokens}, which leaves no room for an answer", max_model_len)
    default = room if fields.default_max_tokens is None else min(room, fields.default_max_tokens)
    tokens = checks.integer("max_tokens", fields.max_tokens, default, 1, limits.UINT32_MAX)
    if tokens > room:
        raise _too_long(
            checks,
            f"{prompt_tokens + tokens} were asked for ({prompt_tokens} in the prompt, {tokens} in the answer)",
            max_model_len,
        )
    if min_tokens > tokens:
        raise checks.refuse("min_tokens", f"is larger than the {tokens} tokens that the answer may have")
    return tokens


def _request_id(checks: Checks, request_id: str | None) -> str:
    if not request_id:
        return uuid.uuid4().hex
    if len(request_id) > limits.MAX_REQUEST_ID_CHARS or not _REQUEST_ID.match(request_id):
        raise checks.refuse(
            "request_id", f"must be 1 to {limits.MAX_REQUEST_ID_CHARS} letters, digits or any of . _ : / @ + = ~ -"
        )
    return request_id


def _program(checks: Checks, program: str | None) -> str:
    if program and len(program) > limits.MAX_PROGRAM_CHARS:
        raise checks.refuse("program", f"must be at most {limits.MAX_PROGRAM_CHARS} characters")
    return program or ""


def _stop_strings(checks: Checks, stops: Sequence[str]) -> StopAutomaton | None:
    checks.at_most("stop", stops, limits.MAX_STOP_STRINGS)
    for stop in stops:
        if not stop:
            raise checks.refuse("stop", "must not contain an empty string")
        if len(stop) > limits.MAX_STOP_STRING_CHARS:
            raise checks.refuse(
                "stop", f"has a string of {len(stop)} characters; the limit is {limits.MAX_STOP_STRING_CHARS}"
            )
    return StopAutomaton(tuple(stops)) if stops else None
